#!/bin/bash
# Runs as a service of the systemd that boot.sh boots; /bareblk.log ends with "all is well" if all is well.
set -ex
show() { systemctl show bareblk.service --property "$1" --value; }
restarted() { # COUNT: waits until the server has been started again so often, and serves
    until [ "$(show NRestarts)" = "$1" ] && [ "$(show ActiveState)" = active ]; do sleep 0.1; done
}
write() { bareblk bench --socket "/run/bareblk/$1" --rw randwrite --bs 4k --size 4M --verify crc32c; }

# No front-end has connected yet.
[ "$(show ActiveState)" = inactive ]
[ -S /run/bareblk/vm1.sock ]
write vm1.sock
[ "$(show ActiveState)" = active ]
[ "$(show StatusText)" = "serving 2 disks" ]
# A disk without a socket unit.
write vm2.sock
bareblk ctl list

server=$(show MainPID)
printf '[[disk]]\nname = "vm3"\nimage = "/var/lib/bareblk/vm3.raw"\nsocket = "/run/bareblk/vm3.sock"\ncreate = "16M"\n' >> /etc/bareblk/bareblk.toml
systemctl reload bareblk.service
until [ "$(show StatusText)" = "serving 3 disks" ]; do sleep 0.1; done
write vm3.sock
# Longer than WatchdogSec=, so systemd must have received the watchdog's signals.
sleep 4
[ "$(show MainPID)" = "$server" ]
[ "$(show NRestarts)" = 0 ]

kill -KILL "$server"
restarted 1
write vm1.sock
# A server that hangs is ended by the watchdog, and started again.
kill -STOP "$(show MainPID)"
restarted 2
write vm1.sock

systemctl stop bareblk.service
[ "$(show Result) $(show ExecMainStatus)" = "success 0" ]
# The socket of the socket unit remains.
[ -S /run/bareblk/vm1.sock ]
[ ! -e /run/bareblk/vm2.sock ]
echo all is well
