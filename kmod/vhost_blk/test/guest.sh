# SPDX-License-Identifier: GPL-2.0-only
# Runs in the guest: loads the module, makes disks, runs the tests, looks for complaints of the kernel.
# $MODULE is the module's path, $TEST the test program's; the kernel's other modules are loaded.
result=0
complain() { echo "FAIL $*"; result=1; }

# stat_refresh makes the counters exact.
held_pins() {
    echo 1 > /proc/sys/vm/stat_refresh
    awk '/^nr_foll_pin_acquired/ { a = $2 } /^nr_foll_pin_released/ { print a - $2 }' /proc/vmstat
}

# disk NAME SIZE_MIB ATTRIBUTE=VALUE...
disk() {
    folder=/sys/kernel/config/nullb/$1
    mkdir "$folder" && echo "$2" > "$folder/size" && shift 2 || complain "disk $1"
    for pair; do echo "${pair#*=}" > "$folder/${pair%%=*}" || complain "disk: $pair"; done
    echo 1 > "$folder/power" || complain "disk: power"
}
mount -t configfs none /sys/kernel/config
disk nb-fast 64 memory_backed=1 discard=1 blocksize=512 badblocks=+50000-50000
disk nb-other 64 memory_backed=1 blocksize=512
disk nb-slow 64 memory_backed=1 blocksize=512 irqmode=2 completion_nsec=300000000
disk nb-4k 64 memory_backed=1 blocksize=4096
rmmod brd
insmod /modules/brd.ko rd_nr=1 rd_size=65536 || complain "ram0"
truncate -s 64M /tmp/loop
losetup /dev/loop0 /tmp/loop

i=0
while [ $i -lt 20 ]; do
    insmod "$MODULE" || complain "load $i"
    [ -c /dev/vhost-blk ] || complain "load $i: no device"
    rmmod vhost_blk || complain "unload $i"
    [ -e /dev/vhost-blk ] && complain "unload $i: the device is still there"
    i=$((i + 1))
done
insmod "$MODULE" || complain load
rmmod vhost 2> /dev/null && complain "vhost can be removed under vhost_blk"

"$TEST" -d /dev/nb-fast -d /dev/ram0 -d /dev/loop0 $ONLY || result=1

[ "$(held_pins)" = 0 ] && echo "ok no-pins-left" || complain "$(held_pins) pages are still pinned"
rmmod vhost_blk && echo "ok unload" || complain "unload"
dmesg | grep -E 'BUG|WARNING|Oops|general protection|refcount|hung task|blocked for more|rcu:.*stall|Call Trace' &&
    complain "the kernel complains" || echo "ok no-complaint"
exit $result
