#!/bin/busybox sh
# The guest's first process: loads modules, mounts what a script needs, runs /script.sh, powers off.
# The last line on the console is BAREBLK-GUEST-EXIT and the script's exit status.
# If the script leaves a file /reboot, the guest resets instead of powering off. If it leaves /switch, the init named in
# that file takes over, from /mnt, and decides what the guest prints and when it ends.
/bin/busybox mkdir -p /proc /sys /dev /tmp /mnt /bin /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
export PATH=/tools:/sbin:/bin:/usr/sbin:/usr/bin HOME=/tmp TERM=dumb
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
mkdir -p /dev/shm && mount -t tmpfs tmpfs /dev/shm
ln -s /proc/mounts /etc/mtab
stty -echo -onlcr < /dev/console

# Powers off by itself, in case the test that should end this guest has ended.
limit_s=$(sed -n 's/.*bareblk\.limit_s=\([0-9]*\).*/\1/p' /proc/cmdline)
[ -n "$limit_s" ] && (sleep "$limit_s"; poweroff -f) > /dev/null 2>&1 &

while read -r module; do
    insmod "/modules/$module" || echo "cannot load $module"
done < /modules/order

sh /script.sh
code=$?
if [ -e /switch ]; then exec switch_root /mnt $(cat /switch); fi
[ "$code" = 0 ] || dmesg | tail -n 30
sync
echo "BAREBLK-GUEST-EXIT $code"
if [ -e /reboot ]; then reboot -f; fi
poweroff -f
