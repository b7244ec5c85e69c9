//! Tests which bytes the server locks, and how it reads /proc. `tests/it/locking.rs` tests conflicts with real
//! programs.

use super::*;

fn bytes_of(access: Access) -> (Vec<i64>, Vec<i64>) {
    let permissions = Permissions::of(access);
    (permissions.own_bytes().collect(), permissions.opposite_bytes().collect())
}

#[test]
fn writer_takes_read_write_resize_and_denies_write_and_resize() {
    assert_eq!(bytes_of(Access::ReadWrite), (vec![100, 101, 103, 201, 203], vec![200, 201, 203, 101, 103]));
}

#[test]
fn reader_takes_read_and_denies_write_and_resize() {
    assert_eq!(bytes_of(Access::ReadOnly), (vec![100, 201, 203], vec![200, 101, 103]));
}

#[test]
fn kernel_shows_exactly_our_bytes_while_we_hold_them() {
    let file = tempfile::tempfile().unwrap();
    assert!(acquire(&file, Access::ReadWrite, Duration::ZERO, || ()).unwrap());
    use std::os::fd::AsRawFd;
    let fdinfo = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd())).unwrap();
    let ranges: Vec<String> = fdinfo
        .lines()
        .filter(|line| line.starts_with("lock:"))
        .map(|line| line.split_whitespace().rev().take(2).collect::<Vec<_>>().join("-"))
        .collect();
    assert_eq!(ranges, ["101-100", "103-103", "201-201", "203-203"]); // last byte, first byte
}

#[test]
fn refused_writer_that_stays_open_is_no_obstacle_to_a_reader() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let (writer, second_reader) = (file.reopen().unwrap(), file.reopen().unwrap());
    let lock = |file: &File, access| acquire(file, access, Duration::ZERO, || ()).unwrap();
    assert!(lock(file.as_file(), Access::ReadOnly));
    assert!(!lock(&writer, Access::ReadWrite));
    assert!(lock(&second_reader, Access::ReadOnly));
}

#[test]
fn wait_is_announced_once_and_only_if_there_is_one() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let other = file.reopen().unwrap();
    let announced = std::cell::Cell::new(0);
    let announce = || announced.set(announced.get() + 1);
    assert!(acquire(file.as_file(), Access::ReadWrite, Duration::from_secs(9), announce).unwrap());
    assert_eq!(announced.get(), 0);
    assert!(!acquire(&other, Access::ReadWrite, Duration::from_millis(350), announce).unwrap());
    assert_eq!(announced.get(), 1);
}

#[test]
fn lock_on_a_file_open_for_writing_only_is_an_error_and_not_a_wait() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let write_only = std::fs::OpenOptions::new().write(true).open(file.path()).unwrap();
    let refused = acquire(&write_only, Access::ReadWrite, Duration::ZERO, || ());
    assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EBADF));
}

#[test]
fn lock_line_of_qemu_is_recognised() {
    assert!(is_image_lock("lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:9978009 100 101"));
}

#[test]
fn whole_file_lock_of_another_program_is_recognised() {
    assert!(is_image_lock("lock:\t1: POSIX  ADVISORY  WRITE 77 fe:00:9978009 0 EOF"));
}

#[test]
fn locks_elsewhere_leases_and_other_lines_are_not_ours() {
    let lines = [
        "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:9978009 0 99",
        "lock:\t1: OFDLCK ADVISORY  READ -1 fe:00:9978009 204 EOF",
        "lock:\t1: FLOCK  ADVISORY  WRITE 77 fe:00:9978009 0 EOF",
        "lock:\t1: OFDLCK",
        "pos:\t0",
        "",
    ];
    assert!(!lines.iter().any(|line| is_image_lock(line)));
}

#[test]
fn holder_is_found_by_the_open_file_and_not_by_its_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let unrelated = tempfile::NamedTempFile::new().unwrap();
    let id = |file: &tempfile::NamedTempFile| FileId::from(&file.as_file().metadata().unwrap());
    assert!(acquire(file.as_file(), Access::ReadOnly, Duration::ZERO, || ()).unwrap());
    let holders = find_holders(Path::new("/proc"), id(&file));
    assert!(holders.iter().any(|holder| holder.pid == std::process::id() && !holder.command.is_empty()));
    assert_eq!(find_holders(Path::new("/proc"), id(&unrelated)), []);
}

#[test]
fn holders_are_named_for_a_sentence_and_one_without_a_readable_name_is_a_number() {
    let named = LockHolder { pid: 7, command: "qemu-io".to_owned() };
    let nameless = LockHolder { pid: 8, command: String::new() };
    assert_eq!(HolderList(&[named, nameless]).to_string(), "qemu-io (pid 7), process 8");
    assert_eq!(HolderList(&[]).to_string(), "a process that /proc does not show");
}
