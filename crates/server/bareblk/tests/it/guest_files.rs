//! A file system on the disk, and a guest that boots from the disk: data is still there after a reset, in a new guest,
//! and for the firmware.

use xtask::guest::Vm;

use crate::guest::{MIB, Served, guest_image, number, run, script, sizes, value};

/// The first boot makes a file system and resets the guest. Later boots check it and add files.
#[test]
fn files_are_whole_after_a_reset_and_in_a_new_guest() {
    let disk = Served::new(sizes::FILES.now() * 4 * MIB + 64 * MIB, &[]);
    let files = sizes::FILES.now();
    let script = format!(
        "write_files() {{ # NAME
             mkdir /mnt/$1; cd /mnt/$1
             for number in $(seq {files}); do
                 dd if=/dev/urandom of=$number bs=7777 count=$((1 + number * 17 % 150)) 2> /dev/null || fail write
             done
             find . -type f ! -name sums | xargs sha256sum > sums
             cd /; umount /mnt || fail umount
         }}
         check_files() {{ (cd /mnt/$1 && sha256sum -c sums | grep -c OK); }}
         if mount -t ext4 /dev/vda /mnt 2> /dev/null; then
             umount /mnt
             fsck.ext4 -fn /dev/vda || fail fsck
             mount -t ext4 /dev/vda /mnt || fail mount
             echo BB:FIRST=$(check_files first)
             [ -e /mnt/second ] && echo BB:SECOND=$(check_files second)
             [ -e /mnt/second ] || write_files second
         else
             mkfs.ext4 -q /dev/vda && mount -t ext4 /dev/vda /mnt || fail mkfs
             write_files first
             touch /reboot
         fi
         echo BB:COMPLAINTS=$(complaints)"
    );

    let with_reset = run(&disk.vm(&script).across_resets());
    let new_guest = run(&disk.vm(&script));

    assert_eq!(with_reset.console.matches("BAREBLK-GUEST-EXIT 0").count(), 2, "{}", with_reset.console);
    assert_eq!(number(&with_reset, "FIRST"), files, "{}", with_reset.console);
    assert_eq!(number(&new_guest, "FIRST"), files, "{}", new_guest.console);
    assert_eq!(number(&new_guest, "SECOND"), files, "{}", new_guest.console);
    assert_eq!(number(&with_reset, "COMPLAINTS") + number(&new_guest, "COMPLAINTS"), 0);
}

/// SeaBIOS drives the disk first (one small queue), then GRUB through SeaBIOS; then the kernel negotiates again.
#[test]
fn firmware_boots_a_guest_from_the_disk_and_again_after_a_reset() {
    let mut disk = Served::new(192 * MIB, &[]);
    disk.terminate();
    let body = "
        if [ \"$(dd if=/dev/vda bs=1M skip=100 count=1 2> /dev/null | head -c 6)\" = booted ]; then
            echo BB:SECOND_SUM=$(checksum vda 101 16)
            echo BB:SAID_SUM=$(dd if=/dev/vda bs=1M skip=99 count=1 2> /dev/null | head -c 64)
        else
            printf booted | dd of=/dev/vda bs=1M seek=100 conv=notrunc,fsync 2> /dev/null
            dd if=/dev/urandom of=/dev/vda bs=1M seek=101 count=16 conv=fsync 2> /dev/null || fail write
            checksum vda 101 16 | dd of=/dev/vda bs=1M seek=99 conv=notrunc,fsync 2> /dev/null
            touch /reboot
        fi
        echo BB:COMPLAINTS=$(complaints)";
    let free_at_bytes = guest_image().write_boot_disk(disk.image(), &script(body)).unwrap();
    assert!(free_at_bytes <= 99 * MIB);
    disk.start();

    let vm = Vm::new(&guest_image()).disk_socket(disk.socket(), 2).boot_from_disk().across_resets();
    let output = run(&vm.timeout(sizes::GUEST_DEADLINE.now()));

    assert_eq!(output.console.matches("BAREBLK-GUEST-EXIT 0").count(), 2, "{}", output.console);
    assert_eq!(value(&output, "SECOND_SUM"), value(&output, "SAID_SUM"), "{}", output.console);
    assert_eq!(number(&output, "COMPLAINTS"), 0, "{}", output.console);
}
