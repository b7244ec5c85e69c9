//! The files with credentials for TLS: which ones an export needs, how they are opened, and how they are read.
//!
//! The helper opens them, and the server reads them: a message never contains a key.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nbd_client::{NbdUri, Tls};
use rustix::fs::OFlags;
use tls_client::X509Pem;

/// Maximum length of a file: a few hundred certificates, or ten thousand keys.
const MAX_FILE_BYTES: usize = 1 << 20;

/// The files that connections to this export read. Not all of them need to exist.
pub fn files_of(uri: &NbdUri) -> Vec<OsString> {
    match &uri.tls {
        None => Vec::new(),
        Some(Tls::Certificates { folder, .. }) => X509Pem::files(folder).map(PathBuf::into_os_string).into(),
        Some(Tls::Psk { file, .. }) => vec![file.into()],
    }
}

/// Opens a file with credentials for reading.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    // Without NONBLOCK, opening a FIFO would wait.
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file.into())
}

/// The contents of a file with credentials.
pub fn contents(file: OwnedFd) -> io::Result<Vec<u8>> {
    // The whole capacity at once: a vector that grows would leave copies of keys behind.
    let mut bytes = Vec::with_capacity(MAX_FILE_BYTES + 1);
    let limit = u64::try_from(bytes.capacity()).unwrap_or(u64::MAX);
    File::from(file).take(limit).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_FILE_BYTES {
        let text = format!("it has more than {MAX_FILE_BYTES} bytes, the limit of a file with credentials");
        return Err(io::Error::other(text));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_regular_file_within_the_limit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.psk");
        std::fs::write(&file, "vm:00").unwrap();
        assert_eq!(contents(open(&file).unwrap()).unwrap(), b"vm:00");
        std::fs::write(&file, vec![b'x'; MAX_FILE_BYTES + 1]).unwrap();
        assert!(contents(open(&file).unwrap()).unwrap_err().to_string().contains("more than 1048576 bytes"));
        assert!(open(folder.path()).unwrap_err().to_string().contains("not a regular file"));
        assert_eq!(open(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
