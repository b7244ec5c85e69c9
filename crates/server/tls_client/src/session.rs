//! One TLS session of GnuTLS, without sockets: encrypted bytes are queued in memory, in both directions.
//!
//! `handshake → encrypt (→ queue to the server) | decrypt (← queue from the server) → close`
//!
//! - GnuTLS calls `push` and `pull` below instead of `send` and `recv`. So a system call moves many records, and this
//!   file waits for nothing.
//! - `push` never refuses bytes: the caller bounds the queue by what it encrypts.
//! - A session stays on one thread.

use std::cell::{RefCell, RefMut};
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::net::IpAddr;
use std::ptr::{NonNull, null_mut};

use crate::credentials::{Credentials, Kind};
use crate::error::{CertificateFault, TlsError};
use crate::library::{
    CLIENT_NONBLOCK, DT_DNS_HOSTNAME, DT_KEY_PURPOSE_OID, Handle, Library, NAME_DNS, PURPOSE_SERVER, SHUT_WR,
    VerifyDatum, code,
};
use crate::queue::Queue;

/// Added to GnuTLS's or the system's default. NBD demands TLS 1.2 or newer. ChaCha20 goes to the end of the list, because
/// AES is several times faster on processors that serve guests (docs/decisions/0062).
const FOR_X509: &CStr = c"-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2:-CHACHA20-POLY1305:+CHACHA20-POLY1305";
/// Also: only key exchanges that need the key, and only those with forward secrecy.
const FOR_PSK: &CStr = c"-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2:-CHACHA20-POLY1305:+CHACHA20-POLY1305:\
    -KX-ALL:+ECDHE-PSK:+DHE-PSK";
/// The most bytes of one record (RFC 8446 §5.1).
pub(crate) const RECORD_BYTES: usize = 1 << 14;
/// How many encrypted bytes of the server are read at once.
const INCOMING_BYTES: usize = 128 << 10;

/// The queues of encrypted bytes, which GnuTLS's callbacks use.
#[derive(Debug)]
pub(crate) struct Wire {
    /// From the server. GnuTLS takes all of it: it keeps the parts of a record itself.
    pub incoming: Queue,
    /// The server sends nothing more.
    pub ended: bool,
    /// To the server.
    pub outgoing: Queue,
}

/// What [`Session::decrypt`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decrypted {
    /// This many bytes.
    Bytes(usize),
    /// More bytes of the server are needed.
    NeedsMore,
    /// The server closed its direction in the orderly way.
    Closed,
}

/// The names that GnuTLS compares with the certificate. GnuTLS keeps pointers to them.
struct Expected {
    host: Option<CString>,
    list: [VerifyDatum; 2],
}

/// The client's end of a TLS connection.
pub(crate) struct Session {
    library: &'static Library,
    handle: Handle,
    /// From `Box::leak`, because GnuTLS keeps the address.
    wire: NonNull<RefCell<Wire>>,
    expected: NonNull<Expected>,
    credentials: Credentials,
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: 1. made by `init`, and not used from now on.
        unsafe { (self.library.deinit)(self.handle) };
        // SAFETY: 1. from `Box::leak` in `new`; 2. the session, which had the address, is gone.
        drop(unsafe { Box::from_raw(self.wire.as_ptr()) });
        // SAFETY: 1. and 2. as above.
        drop(unsafe { Box::from_raw(self.expected.as_ptr()) });
    }
}

impl Session {
    /// A session that has not sent anything yet.
    pub fn new(credentials: &Credentials, host: Option<&str>) -> Result<Self, TlsError> {
        let library = credentials.library();
        let expected = expect(host)?;
        let mut handle = null_mut();
        // SAFETY: 1. the handle is stored in a local variable.
        library.check(unsafe { (library.init)(&raw mut handle, CLIENT_NONBLOCK) })?;
        let incoming = Queue::with_capacity(INCOMING_BYTES);
        let wire = Wire { incoming, ended: false, outgoing: Queue::with_capacity(INCOMING_BYTES) };
        let wire = NonNull::from(Box::leak(Box::new(RefCell::new(wire))));
        let expected = NonNull::from(Box::leak(Box::new(expected)));
        let session = Self { library, handle, wire, expected, credentials: credentials.clone() };
        session.configure()?;
        if credentials.kind() == Kind::X509 {
            session.verify(host)?;
        }
        Ok(session)
    }

    fn configure(&self) -> Result<(), TlsError> {
        let (library, handle) = (self.library, self.handle);
        let priorities = match self.credentials.kind() {
            Kind::X509 => FOR_X509,
            Kind::Psk => FOR_PSK,
        };
        let append = library.set_default_priority_append;
        // SAFETY: 1. handle: made by `init`; 2. string: constant; 3. the position of an error is not wanted.
        library.check(unsafe { append(handle, priorities.as_ptr(), null_mut(), 0) })?;
        let (number, credentials) = (self.credentials.number(), self.credentials.handle());
        // SAFETY: 1. handle: as above; 2. credentials: of this kind, and kept by `self` until after `deinit`.
        library.check(unsafe { (library.credentials_set)(handle, number, credentials) })?;
        // SAFETY: 1. handle: as above; 2. the address stays valid until after `deinit`.
        unsafe { (library.transport_set_ptr)(handle, self.wire.as_ptr().cast()) };
        // SAFETY: 1. handle: as above; 2. `push` expects what `transport_set_ptr` has set.
        unsafe { (library.transport_set_push_function)(handle, push) };
        // SAFETY: 1. handle: as above; 2. so does `pull`.
        unsafe { (library.transport_set_pull_function)(handle, pull) };
        Ok(())
    }

    /// Lets GnuTLS check the server's certificate during the handshake.
    fn verify(&self, host: Option<&str>) -> Result<(), TlsError> {
        let (library, handle) = (self.library, self.handle);
        // SAFETY: 1. from `Box::leak`, freed by `drop` only; 2. nothing changes it.
        let expected = unsafe { self.expected.as_ref() };
        // The host's name is the second element.
        let count = if expected.host.is_some() { 2 } else { 1 };
        // SAFETY: 1. handle: made by `init`; 2. list: at its address until after `deinit`, and at least `count` long.
        unsafe { (library.session_set_verify_cert2)(handle, expected.list.as_ptr(), count, 0) };
        let Some(name) = host.filter(|host| host.parse::<IpAddr>().is_err()) else { return Ok(()) };
        // SAFETY: 1. handle: as above; 2. name: valid for this call, which copies it.
        library
            .check(unsafe { (library.server_name_set)(handle, NAME_DNS, name.as_ptr().cast(), name.len()) })
    }

    /// The queues of encrypted bytes. The borrow must end before the next call of another function.
    pub fn wire(&self) -> RefMut<'_, Wire> {
        // SAFETY: 1. from `Box::leak`, freed by `drop` only; 2. everybody uses it through the `RefCell`.
        unsafe { self.wire.as_ref() }.borrow_mut()
    }

    /// Continues the handshake with what has arrived. False: it needs more bytes from the server.
    pub fn handshake(&mut self) -> Result<bool, TlsError> {
        loop {
            // SAFETY: 1. handle: made by `init`, used on this thread only; 2. nothing borrows the queues.
            let result = unsafe { (self.library.handshake)(self.handle) };
            match result {
                0.. => return self.check_kind().map(|()| true),
                code::AGAIN => return Ok(false),
                failure if self.is_fatal(failure) => {
                    let error = self.error(failure);
                    // SAFETY: 1. and 2. as above. Only queued; it does not matter if the server never gets it.
                    unsafe { (self.library.alert_send_appropriate)(self.handle, failure) };
                    return Err(error);
                }
                _ => {} // a warning, which has been taken from the queue
            }
        }
    }

    /// The server has proved itself by what the caller asked for.
    fn check_kind(&self) -> Result<(), TlsError> {
        // SAFETY: 1. handle: made by `init`; its handshake is over.
        let kind = unsafe { (self.library.auth_get_type)(self.handle) };
        if kind == self.credentials.number() {
            return Ok(());
        }
        Err(TlsError::OtherKind { check: self.advice() })
    }

    /// Encrypts all bytes into the queue to the server.
    pub fn encrypt(&mut self, mut bytes: &[u8]) -> Result<(), TlsError> {
        while !bytes.is_empty() {
            // SAFETY: 1. handle: made by `init`, used on this thread only; 2. bytes: valid for this call; 3. nothing
            // borrows the queues.
            let sent = unsafe { (self.library.record_send)(self.handle, bytes.as_ptr().cast(), bytes.len()) };
            match usize::try_from(sent) {
                Ok(count) => bytes = &bytes[count..],
                Err(_) => return Err(self.error(negative(sent))),
            }
        }
        Ok(())
    }

    /// Decrypts the next record that has arrived. `room` should hold a whole one.
    pub fn decrypt(&mut self, room: &mut [u8]) -> Result<Decrypted, TlsError> {
        loop {
            // SAFETY: 1. handle: made by `init`, used on this thread only; 2. room: valid for this call; 3. nothing
            // borrows the queues.
            let got =
                unsafe { (self.library.record_recv)(self.handle, room.as_mut_ptr().cast(), room.len()) };
            match usize::try_from(got) {
                Ok(0) => return Ok(Decrypted::Closed),
                Ok(count) => return Ok(Decrypted::Bytes(count)),
                Err(_) => match negative(got) {
                    code::AGAIN => return Ok(Decrypted::NeedsMore),
                    failure if self.is_fatal(failure) => return Err(self.error(failure)),
                    _ => {} // a warning or a request for a new handshake, which has been taken from the queue
                },
            }
        }
    }

    /// Queues `close_notify` to the server.
    pub fn close(&mut self) {
        // SAFETY: 1. handle: made by `init`, used on this thread only; 2. nothing borrows the queues.
        unsafe { (self.library.bye)(self.handle, SHUT_WR) };
    }

    fn is_fatal(&self, failure: c_int) -> bool {
        // SAFETY: 1. any number is allowed.
        failure != code::INTERRUPTED && unsafe { (self.library.error_is_fatal)(failure) } != 0
    }

    fn error(&self, failure: c_int) -> TlsError {
        match failure {
            code::CERTIFICATE_VERIFICATION_ERROR => {
                // SAFETY: 1. handle: made by `init`.
                let status = unsafe { (self.library.session_get_verify_cert_status)(self.handle) };
                TlsError::Certificate(self.fault(status))
            }
            code::FATAL_ALERT_RECEIVED => TlsError::Refused { alert: self.alert(), check: self.advice() },
            code::INSUFFICIENT_CREDENTIALS => TlsError::OtherKind { check: self.advice() },
            code::PREMATURE_TERMINATION => TlsError::Cut,
            code::UNSUPPORTED_VERSION_PACKET
            | code::UNEXPECTED_PACKET_LENGTH
            | code::UNEXPECTED_PACKET
            | code::UNEXPECTED_HANDSHAKE_PACKET
            | code::RECORD_OVERFLOW => TlsError::NotTls { reason: self.library.text(failure) },
            _ => TlsError::Failed { reason: self.library.text(failure) },
        }
    }

    /// The alert that the server sent last.
    fn alert(&self) -> String {
        // SAFETY: 1. handle: made by `init`.
        let number = unsafe { (self.library.alert_get)(self.handle) };
        // SAFETY: 1. any number is allowed.
        let name = unsafe { (self.library.alert_get_name)(number) };
        if name.is_null() {
            return format!("alert {number}");
        }
        // SAFETY: 1. not null, hence a constant string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// The fault to tell, of all that GnuTLS found.
    fn fault(&self, status: c_uint) -> CertificateFault {
        // SAFETY: 1. from `Box::leak`, freed by `drop` only; 2. nothing changes it.
        let host = unsafe { self.expected.as_ref() }.host.as_deref().unwrap_or_default();
        let host = host.to_string_lossy().into_owned();
        let by_importance = [
            (SIGNER_NOT_FOUND | SIGNER_NOT_CA | SIGNATURE_FAILURE, CertificateFault::UnknownIssuer),
            (REVOKED, CertificateFault::Revoked),
            (EXPIRED, CertificateFault::Expired),
            (NOT_ACTIVATED, CertificateFault::NotYetValid),
            (UNEXPECTED_OWNER, CertificateFault::WrongHost { host }),
            (PURPOSE_MISMATCH, CertificateFault::WrongPurpose),
            (INSECURE_ALGORITHM, CertificateFault::Insecure),
        ];
        let found = by_importance.into_iter().find(|(bits, _)| status & bits != 0);
        found.map_or(CertificateFault::Other { status }, |(_, fault)| fault)
    }

    /// What to check if the server refuses the connection.
    pub fn advice(&self) -> &'static str {
        self.credentials.kind().advice()
    }
}

/// `gnutls_certificate_status_t`.
const REVOKED: c_uint = 1 << 5;
const SIGNER_NOT_FOUND: c_uint = 1 << 6;
const SIGNER_NOT_CA: c_uint = 1 << 7;
const INSECURE_ALGORITHM: c_uint = 1 << 8;
const NOT_ACTIVATED: c_uint = 1 << 9;
const EXPIRED: c_uint = 1 << 10;
const SIGNATURE_FAILURE: c_uint = 1 << 11;
const UNEXPECTED_OWNER: c_uint = 1 << 14;
const PURPOSE_MISMATCH: c_uint = 1 << 18;

fn expect(host: Option<&str>) -> Result<Expected, TlsError> {
    let zero_byte = |name: &str| TlsError::BadName { name: name.to_owned() };
    let host = host.map(|name| CString::new(name).map_err(|_| zero_byte(name))).transpose()?;
    let purpose = VerifyDatum { kind: DT_KEY_PURPOSE_OID, data: PURPOSE_SERVER.as_ptr(), size: 0 };
    // A `CString` does not move its bytes when it is moved.
    let name = host.as_ref().map_or(std::ptr::null(), |host| host.as_ptr());
    Ok(Expected { list: [purpose, VerifyDatum { kind: DT_DNS_HOSTNAME, data: name, size: 0 }], host })
}

fn negative(result: isize) -> c_int {
    c_int::try_from(result).unwrap_or(c_int::MIN)
}

/// GnuTLS sends. `wire`: the session's [`Wire`].
unsafe extern "C" fn push(wire: *mut c_void, bytes: *const c_void, count: usize) -> isize {
    // SAFETY: 1. what `configure` has set, valid until after `deinit`.
    let wire = unsafe { &*wire.cast::<RefCell<Wire>>() };
    // SAFETY: 1. GnuTLS passes `count` bytes that are valid for this call.
    let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), count) };
    wire.borrow_mut().outgoing.append(bytes);
    count.cast_signed()
}

/// GnuTLS receives. `wire`: the session's [`Wire`].
unsafe extern "C" fn pull(wire: *mut c_void, room: *mut c_void, count: usize) -> isize {
    // SAFETY: 1. what `configure` has set, valid until after `deinit`.
    let wire = unsafe { &*wire.cast::<RefCell<Wire>>() };
    let mut wire = wire.borrow_mut();
    if wire.incoming.is_empty() {
        if wire.ended {
            return 0;
        }
        // SAFETY: 1. takes no arguments.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: 1. the calling thread's own variable.
        unsafe { *errno = libc::EAGAIN };
        return -1;
    }
    let count = count.min(wire.incoming.len());
    let bytes = wire.incoming.filled().as_ptr();
    // SAFETY: 1. source: `count` bytes of the queue; 2. destination: GnuTLS passes at least `count` writable bytes;
    // 3. they are GnuTLS's own memory, so that they do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(bytes, room.cast::<u8>(), count) };
    wire.incoming.consume(count);
    count.cast_signed()
}
