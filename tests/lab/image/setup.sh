#!/bin/sh
# Runs on the building machine once the packages lie in $1: makes the tree a bare host that Ansible can reach.
set -eu
root=$1

chroot "$root" useradd --create-home --shell /bin/bash ops
chmod 0440 "$root/etc/sudoers.d/ops"

# Whatever is unique to a host comes with the host: its SSH key from lab.py, its machine-id at first boot.
rm -f "$root"/etc/ssh/ssh_host_*
: > "$root/etc/machine-id"

# Installed, as on a host where someone tried them, but nothing of ours relies on them running.
systemctl --quiet --root="$root" disable nginx.service haproxy.service postgresql.service

# A cluster takes the first port that is free, and the building machine may have one of its own.
sed -i 's/^port = .*/port = 5432/' "$root"/etc/postgresql/*/main/postgresql.conf

# Timers that would ask the network, and kernel settings that the hosts of a lab share with the machine.
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer e2scrub_reap.service \
  fstrim.timer systemd-sysctl.service; do
  ln -sf /dev/null "$root/etc/systemd/system/$unit"
done

# Inside the air gap there is no package source, and a name lookup goes the default route, where the sink counts it.
rm -rf "$root"/etc/apt/sources.list "$root"/etc/apt/sources.list.d/*
rm -f "$root/etc/resolv.conf"
printf 'nameserver 192.0.2.53\noptions timeout:1 attempts:1\n' > "$root/etc/resolv.conf"
