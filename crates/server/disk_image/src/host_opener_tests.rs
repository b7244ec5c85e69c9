//! Tests with sockets and special files on the real file system.

use std::os::unix::net::{UnixListener, UnixStream};

use rustix::fs::FileType;

use super::*;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn bound_socket_listens_and_is_for_its_owner_only() {
    let folder = folder();
    let path = folder.path().join("s");
    let socket = HostOpener.bind_socket(&path).unwrap();
    assert_eq!(mode(&path) & !0o600, 0);
    let client = UnixStream::connect(&path).unwrap();
    assert!(UnixListener::from(socket).accept().is_ok());
    drop(client);
}

#[test]
fn bound_socket_is_closed_on_exec() {
    let folder = folder();
    let socket = HostOpener.bind_socket(&folder.path().join("s")).unwrap();
    let flags = rustix::io::fcntl_getfd(&socket).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn path_in_use_is_not_bound_again_and_stays() {
    let folder = folder();
    let path = folder.path().join("s");
    std::fs::write(&path, "precious").unwrap();
    assert_eq!(HostOpener.bind_socket(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn path_of_108_bytes_is_too_long_and_one_of_107_is_not() {
    let folder = folder();
    let base = folder.path().as_os_str().len() + 1;
    let name = |total: usize| folder.path().join("x".repeat(total - base));
    let error = HostOpener.bind_socket(&name(MAX_SOCKET_PATH_BYTES + 1)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NAMETOOLONG.raw_os_error()));
    assert!(HostOpener.bind_socket(&name(MAX_SOCKET_PATH_BYTES)).is_ok());
}

#[test]
fn connecting_tells_a_live_socket_from_a_dead_and_a_missing_one() {
    let folder = folder();
    let path = folder.path().join("s");
    let kind = || HostOpener.connect_socket(&path).map_err(|error| error.kind());
    assert_eq!(kind(), Err(io::ErrorKind::NotFound));
    let server = HostOpener.bind_socket(&path).unwrap();
    assert_eq!(kind(), Ok(()));
    drop(server);
    assert_eq!(kind(), Err(io::ErrorKind::ConnectionRefused));
}

#[test]
fn connecting_to_a_server_that_never_accepts_says_alive_instead_of_hanging() {
    let folder = folder();
    let path = folder.path().join("s");
    let _server = HostOpener.bind_socket(&path).unwrap();
    let refused = (0..1000).find_map(|_| HostOpener.connect_socket(&path).err());
    assert_eq!(refused.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
}

#[test]
fn socket_mode_is_widened_when_asked() {
    let folder = folder();
    let path = folder.path().join("s");
    let _server = HostOpener.bind_socket(&path).unwrap();
    HostOpener.set_socket_owner(&path, 0o660, None, None).unwrap();
    assert_eq!(mode(&path), 0o660);
}

#[test]
fn socket_goes_to_the_owner_and_group_asked_for() {
    use std::os::unix::fs::MetadataExt;
    if !rustix::process::geteuid().is_root() {
        return xtask::skip::skip(xtask::skip::Reason::NotRoot, "only root can give files to other users");
    }
    let folder = folder();
    let path = folder.path().join("s");
    let _server = HostOpener.bind_socket(&path).unwrap();
    HostOpener.set_socket_owner(&path, 0o600, Some(1234), Some(4321)).unwrap();
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!((metadata.uid(), metadata.gid()), (1234, 4321));
}

#[test]
fn owner_of_a_file_or_of_a_links_target_is_not_changed() {
    let folder = folder();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let refused = [&file, &link].map(|path| HostOpener.set_socket_owner(path, 0o666, None, None));
    assert!(refused.iter().all(Result::is_err));
    assert_eq!(mode(&file), 0o600);
}

#[test]
fn named_pipe_that_slipped_in_does_not_hang_the_open() {
    let folder = folder();
    let path = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let request = OpenRequest { access: Access::ReadOnly, direct: false, create: None, exclusive: false };
    let pipe = File::from(HostOpener.open_image(&path, &request).unwrap());
    assert_eq!(FileKind::from(pipe.metadata().unwrap().file_type()), FileKind::Fifo);
}

#[test]
fn socket_that_replaced_ours_has_another_id() {
    let folder = folder();
    let path = folder.path().join("s");
    let _ours = HostOpener.bind_socket(&path).unwrap();
    let before = HostOpener.file_id(&path).unwrap();
    assert_eq!(HostOpener.file_id(&path).unwrap(), before);
    // Renamed, not removed, so that the file system does not reuse its inode number.
    std::fs::rename(&path, folder.path().join("old")).unwrap();
    let _theirs = HostOpener.bind_socket(&path).unwrap();
    assert_ne!(HostOpener.file_id(&path).unwrap(), before);
}

#[test]
fn id_of_a_link_is_not_its_targets_and_nothing_has_none() {
    let folder = folder();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_ne!(HostOpener.file_id(&link).unwrap(), HostOpener.file_id(&file).unwrap());
    let missing = HostOpener.file_id(&folder.path().join("none")).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

#[test]
fn unlink_removes_a_socket() {
    let folder = folder();
    let path = folder.path().join("s");
    drop(HostOpener.bind_socket(&path).unwrap());
    HostOpener.unlink(&path).unwrap();
    assert_eq!(HostOpener.file_kind(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
}
