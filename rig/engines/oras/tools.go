//go:build tools

// Package tools pins the commands that the rig builds from this module.
package tools

import (
	_ "oras.land/oras/cmd/oras"
)
