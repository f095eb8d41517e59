"""The host that a node's service is part of: the bundle it runs from, its unit, the kubelet's drop-in.

A service in front of the kubelet cannot be a pod: it must be there before pods are. So it is put in place
like any host service, without pip, and taken away again without a trace. `bundle` makes what runs, `units`
the files that systemd and the kubelet read, `steps` and `setup` change the host step by step, `kubelet`
reads what the kubelet was told, `notify` speaks to systemd. The command line wires them.
"""
