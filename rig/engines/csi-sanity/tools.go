//go:build tools

// Package tools pins the commands that the rig builds from this module.
package tools

import (
	_ "github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"
)
