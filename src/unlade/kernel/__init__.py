"""The only room that talks to the C library and to system calls Python has no name for.

`beneath` opens names below a directory descriptor, `files` has the renames, syncs and removals that need
descriptors, `mounts` the mount calls, `confine` what a worker gives up, `failpoints` the points at which
tests break things. Everything raises OSError (mounts: MountError); meaning is given above.
"""
