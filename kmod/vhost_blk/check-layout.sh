#!/bin/sh
# SPDX-License-Identifier: GPL-2.0-only
# Fails unless vhost.ko and our module have the same layout of the structures that both use. A vhost.h of another kernel
# version compiles, and symbol versions do not notice it.
#
# check-layout.sh VMLINUX VHOST_KO OUR_KO [PAHOLE]
set -eu
vmlinux=$1 theirs=$2 ours=$3 pahole=${4:-pahole}

command -v "$pahole" > /dev/null || { echo "the layout cannot be checked without pahole" >&2; exit 1; }
[ -e "$vmlinux" ] || { echo "the layout cannot be checked without $vmlinux" >&2; exit 1; }
[ -e "$theirs" ] || { echo "the layout cannot be checked without the kernel's vhost.ko (VHOST_KO)" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $theirs in
*.xz) xz -dc "$theirs" > "$work/vhost.ko" ;;
*.zst) zstd -qdc "$theirs" > "$work/vhost.ko" ;;
*.gz) gzip -dc "$theirs" > "$work/vhost.ko" ;;
*) cp "$theirs" "$work/vhost.ko" ;;
esac
for struct in vhost_dev vhost_virtqueue vhost_worker vhost_poll; do
	"$pahole" --btf_base "$vmlinux" -C "$struct" "$work/vhost.ko" > "$work/theirs"
	"$pahole" --btf_base "$vmlinux" -C "$struct" "$ours" > "$work/ours"
	[ -s "$work/theirs" ] || { echo "vhost.ko does not describe struct $struct" >&2; exit 1; }
	cmp -s "$work/theirs" "$work/ours" || {
		diff "$work/theirs" "$work/ours" >&2 || true
		echo "struct $struct differs from the kernel's: VHOST_H belongs to another kernel" >&2
		exit 1
	}
done
echo "vhost_dev, vhost_virtqueue, vhost_worker and vhost_poll have the kernel's layout"
