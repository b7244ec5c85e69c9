//! What a guest's request learns of a change that fails.

use std::io;

use qcow2::WriteError;
use rustix::io::Errno;

use crate::volume::link::ChangeError;

const EIO: i32 = Errno::IO.raw_os_error();
const ENOSPC: i32 = Errno::NOSPC.raw_os_error();

pub(super) fn change_error(error: &WriteError) -> ChangeError {
    let errno = error.io_error().and_then(|error| match error.kind() {
        io::ErrorKind::StorageFull => Some(ENOSPC),
        _ => error.raw_os_error(),
    });
    let is_damaged = error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::InvalidData);
    match error {
        WriteError::Sync(_) => ChangeError::SyncFailed(errno.unwrap_or(EIO)),
        WriteError::Damaged { .. } => ChangeError::Damaged,
        WriteError::Format(_) if errno.is_none() => ChangeError::Damaged,
        _ if is_damaged => ChangeError::Damaged,
        _ => ChangeError::Errno(errno.unwrap_or(EIO)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_file_system_reaches_the_guest_as_what_it_is() {
        let source = || io::Error::from_raw_os_error(28);
        let full = WriteError::Io { action: "write", what: "L2 table", offset: 0, source: source() };
        assert_eq!(change_error(&full), ChangeError::Errno(28));
        let source = || io::ErrorKind::StorageFull.into();
        let full = WriteError::Io { action: "grow", what: "refcount table", offset: 0, source: source() };
        assert_eq!(change_error(&full), ChangeError::Errno(28), "no room in the format");
        assert_eq!(change_error(&WriteError::Sync(source())), ChangeError::SyncFailed(28));
        assert_eq!(change_error(&WriteError::Stopped { reason: String::new() }), ChangeError::Errno(5));
    }
}
