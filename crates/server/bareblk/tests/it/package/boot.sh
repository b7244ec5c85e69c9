#!/bin/bash
# boot.sh ROOT: boots the systemd of the Debian in ROOT, in namespaces and a control group of its own, until it powers
# off. This is not a virtual machine: systemd and its handling of units are real, but the kernel is the host's.
set -e
export ROOT="$1"
hierarchy=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
group="$hierarchy/bareblk-test-$$"
mkdir "$group"
echo $$ > "$group/cgroup.procs"
trap 'echo $$ > "$hierarchy/cgroup.procs"; find "$group" -depth -type d -exec rmdir {} +' EXIT
unshare --mount --uts --ipc --net --pid --fork --kill-child --cgroup -- bash -c '
set -e
mount --make-rprivate /
mount --bind "$ROOT" "$ROOT"
cd "$ROOT"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
for folder in run tmp dev; do mount -t tmpfs tmpfs "$folder"; done
mkdir dev/pts dev/shm
for device in null zero full random urandom tty; do touch "dev/$device"; mount --bind "/dev/$device" "dev/$device"; done
ln -s /proc/self/fd dev/fd
touch dev/console
pivot_root . mnt
umount -l /mnt
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd --system --unit=test.target
' || true # systemd ends by a signal when it powers off
