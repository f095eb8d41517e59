"""The files that systemd and the kubelet read: texts, and where they go.

The unit is ordered after containerd and before the kubelet, which exits when its image service is missing.
What it may do is narrowed as far as the service allows: it writes into containerd's snapshots, wherever
containerd keeps them, with the owners and attributes that archives name, and its workers lock themselves up
(`kernel.confine`), for which they need rights of their own. systemd is told of the start by `notify`.

Spec: systemd.exec(5), systemd.service(5); KubeletConfiguration v1beta1, drop-ins by `--config-dir`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

UNIT: Final = "unlade-node.service"
UNIT_DIRECTORY: Final = PurePosixPath("/etc/systemd/system")
# Started with the machine, and by whoever starts the kubelet alone.
WANTED_BY: Final = ("multi-user.target", "kubelet.service")
# Above a distribution's own 10- and 20-, below an administrator's 90-.
DROP_IN: Final = "50-unlade.conf"
CONFIG_DIRECTORY: Final = "/etc/kubernetes/kubelet.conf.d"

_UNIT: Final = """\
# Written by `unlade node install`, which writes it anew: changes belong in `systemctl edit {unit}`.
[Unit]
Description=Unlade, the image service of the kubelet in front of containerd
After=containerd.service
Wants=containerd.service
Before=kubelet.service
# The kubelet cannot start without us: never stop trying.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={command}
Restart=always
RestartSec=1
# A start waits up to a minute for containerd, then tidies up what a killed predecessor left.
TimeoutStartSec=180
# Running calls have their grace (--grace); what is left then is killed, workers included.
TimeoutStopSec={stop}
KillMode=mixed
OOMScoreAdjust=-900
LimitNOFILE=1048576
TasksMax=infinity

# Files of archives: owners, modes, attributes. Workers: chroot, namespaces, trusted.* attributes.
CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_SETFCAP
CapabilityBoundingSet=CAP_MKNOD CAP_SYS_CHROOT CAP_SYS_ADMIN CAP_KILL
NoNewPrivileges=yes
{view}RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
# Netlink: the C library asks for its addresses before it connects.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
# Not RestrictSUIDSGID and RestrictNamespaces: files and workers need both.

[Install]
WantedBy={wanted}
"""

# These give the service a mount namespace of its own.
_OWN_VIEW: Final = """\
# /usr, /boot and /etc; not `strict`, because containerd's root may be anywhere else.
ProtectSystem=full
# The node's own Docker configuration is in root's home.
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
"""
_HOSTS_VIEW: Final = """\
# The host's own mount namespace (--csi): what we mount must reach the kubelet, so nothing may hide it.
"""

_DROP_IN: Final = """\
# Written by `unlade node install`; `unlade node uninstall` takes it away.
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
imageServiceEndpoint: unix://{socket}
"""


def service(program: str, arguments: Sequence[str], *, grace: float, mounts: bool) -> str:
    """The unit's text: `program node serve ARGUMENTS`; `mounts`: it mounts for the kubelet."""
    command = " ".join(_word(word) for word in (program, "node", "serve", *arguments))
    # Ten seconds more than the grace: systemd must not kill what is about to end.
    return _UNIT.format(
        unit=UNIT,
        command=command,
        stop=int(grace) + 10,
        wanted=" ".join(WANTED_BY),
        view=_HOSTS_VIEW if mounts else _OWN_VIEW,
    )


def drop_in(socket: str) -> str:
    """The kubelet's drop-in: our socket as its image service."""
    return _DROP_IN.format(socket=socket)


def wants() -> list[PurePosixPath]:
    """The links that make systemd start the unit; what `systemctl enable` makes of [Install]."""
    return [UNIT_DIRECTORY / f"{wanted}.wants" / UNIT for wanted in WANTED_BY]


def _word(word: str) -> str:
    """One word of a command line, as systemd.service(5) quotes it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if not word or any(char in word for char in " \t'\"\\;") else escaped
