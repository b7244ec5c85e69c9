//! Negotiates an export with a server: fixed newstyle, structured replies, `NBD_OPT_GO`.
//!
//! `greeting → flags (→ STARTTLS → the TLS handshake, then on the decrypted socket) → STRUCTURED_REPLY → GO (or EXPORT_NAME of an old server) → ExportInfo; then requests may be sent`
//!
//! Source: proto.md, "Fixed newstyle negotiation" and "Option types".

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use crate::dial::{Dial, Secured};
use crate::error::NbdError;
use crate::negotiation::wire::Wire;
use crate::protocol::{
    FIXED_NEWSTYLE, FLAG_CAN_MULTI_CONN, FLAG_READ_ONLY, FLAG_ROTATIONAL, FLAG_SEND_FLUSH, FLAG_SEND_FUA,
    FLAG_SEND_TRIM, FLAG_SEND_WRITE_ZEROES, GREETING, INFO_BLOCK_SIZE, INFO_EXPORT, NO_ZEROES, OPT_ABORT,
    OPT_EXPORT_NAME, OPT_GO, OPT_INFO, OPT_STARTTLS, OPT_STRUCTURED_REPLY, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    REP_ACK, REP_ERR_BLOCK_SIZE_REQD, REP_ERR_POLICY, REP_ERR_SHUTDOWN, REP_ERR_TLS_REQD, REP_ERR_UNKNOWN,
    REP_ERR_UNSUP, REP_ERROR, REP_INFO, u16_at, u32_at, u64_at,
};
use crate::uri::NbdUri;

/// Maximum length of a reply to an option. Names and messages have at most 4096 bytes.
const MAX_REPLY_BYTES: u32 = 16 << 10;
/// Maximum number of information replies to one option.
const MAX_REPLIES: usize = 64;
/// Maximum length of a server's message in our errors.
const SHOWN_BYTES: usize = 200;
/// Zeroes that an old server sends after its answer to `NBD_OPT_EXPORT_NAME`.
const OLD_ZEROES: usize = 124;
/// The largest block that guests accept, and so the largest minimum that an export may demand.
const MAX_MIN_BLOCK: u32 = 4096;
/// The largest request of a server without a limit, which need not be a multiple of its smallest block: proto.md, "Block
/// size constraints".
const NO_MAX_BLOCK: u32 = u32::MAX;
/// Largest request to a server that states no limit: proto.md, "Block size constraints".
const DEFAULT_MAX_BLOCK: u32 = 32 << 20;

/// What a server says about an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// The size, at most 2^63 - 1.
    pub size_bytes: u64,
    /// Requests must be aligned to this many bytes: a power of two, at most 4096.
    pub min_block_bytes: u32,
    /// Requests of this alignment are fast.
    pub preferred_block_bytes: u32,
    /// Maximum length of a read or write.
    pub max_block_bytes: u32,
    /// Reads are answered in chunks.
    pub structured: bool,
    flags: u16,
}

impl ExportInfo {
    fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Writes are refused.
    #[must_use]
    pub fn is_read_only(self) -> bool {
        self.has(FLAG_READ_ONLY)
    }

    /// `NBD_CMD_FLUSH` works. Without it, the server has no volatile cache that a client could flush.
    #[must_use]
    pub fn can_flush(self) -> bool {
        self.has(FLAG_SEND_FLUSH)
    }

    /// A write's own request can make it durable.
    #[must_use]
    pub fn has_fua(self) -> bool {
        self.has(FLAG_SEND_FUA)
    }

    /// `NBD_CMD_TRIM` works.
    #[must_use]
    pub fn can_trim(self) -> bool {
        self.has(FLAG_SEND_TRIM)
    }

    /// `NBD_CMD_WRITE_ZEROES` works.
    #[must_use]
    pub fn can_write_zeroes(self) -> bool {
        self.has(FLAG_SEND_WRITE_ZEROES)
    }

    /// The storage is a rotating disk.
    #[must_use]
    pub fn is_rotational(self) -> bool {
        self.has(FLAG_ROTATIONAL)
    }

    /// Several connections see each other's writes, and a flush on one covers them all.
    #[must_use]
    pub fn can_multi_conn(self) -> bool {
        self.has(FLAG_CAN_MULTI_CONN)
    }

    /// Why a disk that was opened with the properties `self` cannot go on with `new`, if so.
    pub(crate) fn weakened_in(self, new: Self) -> Option<String> {
        if new.size_bytes < self.size_bytes {
            return Some(format!("its size shrank from {} to {} bytes", self.size_bytes, new.size_bytes));
        }
        let needed = FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_SEND_TRIM | FLAG_SEND_WRITE_ZEROES;
        if new.is_read_only() && !self.is_read_only() {
            return Some("it has become read-only".to_owned());
        }
        if self.flags & needed & !new.flags != 0 || self.can_multi_conn() && !new.can_multi_conn() {
            return Some(format!("it lost features (flags {:#06x}, before {:#06x})", new.flags, self.flags));
        }
        if new.min_block_bytes > self.min_block_bytes || new.max_block_bytes < self.max_block_bytes {
            return Some("its block size limits became stricter".to_owned());
        }
        None
    }

    fn new(size_bytes: u64, flags: u16, structured: bool) -> Self {
        let (min_block_bytes, preferred_block_bytes) = (1, 4096);
        let max_block_bytes = DEFAULT_MAX_BLOCK;
        Self { size_bytes, min_block_bytes, preferred_block_bytes, max_block_bytes, structured, flags }
    }
}

/// What to do once the export's properties are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Requests follow on the socket.
    Transmission,
    /// The connection ends.
    Information,
}

/// Negotiates the export on a new connection. Requests can then be sent on the socket that this returns: with TLS, it is
/// another one.
///
/// # Errors
/// [`NbdError`]; the connection is closed.
pub fn negotiate(
    socket: OwnedFd,
    uri: &NbdUri,
    dial: &dyn Dial,
    timeout: Duration,
) -> Result<(OwnedFd, ExportInfo), NbdError> {
    run(socket, uri, dial, timeout, Goal::Transmission)
}

/// Asks for the export's properties on a new connection, which then ends.
pub(crate) fn ask(
    socket: OwnedFd,
    uri: &NbdUri,
    dial: &dyn Dial,
    timeout: Duration,
) -> Result<ExportInfo, NbdError> {
    run(socket, uri, dial, timeout, Goal::Information).map(|(_, info)| info)
}

fn run(
    socket: OwnedFd,
    uri: &NbdUri,
    dial: &dyn Dial,
    timeout: Duration,
    goal: Goal,
) -> Result<(OwnedFd, ExportInfo), NbdError> {
    let plain = Negotiation { wire: Wire::new(&socket, timeout), uri, timeout };
    let no_zeroes = plain.greet()?;
    let Some(tls) = &uri.tls else {
        let info = plain.export(goal, no_zeroes)?;
        return Ok((socket, info));
    };
    plain.ask_for_tls()?;
    let failed = |source| NbdError::Tls { address: uri.address.clone(), source };
    let Secured { socket, end } = dial.start_tls(socket, tls, timeout).map_err(failed)?;
    let secret = Negotiation { wire: Wire::new(&socket, timeout), uri, timeout };
    match secret.export(goal, no_zeroes) {
        Ok(info) => Ok((socket, info)),
        Err(NbdError::Lost { address, timeout, source }) => Err(match end() {
            Some(reason) => failed(io::Error::other(reason)),
            None => NbdError::Lost { address, timeout, source },
        }),
        Err(error) => Err(error),
    }
}

struct Negotiation<'a> {
    wire: Wire<'a>,
    uri: &'a NbdUri,
    timeout: Duration,
}

/// A reply to an option.
struct Reply {
    kind: u32,
    data: Vec<u8>,
}

impl Negotiation<'_> {
    /// Ends the part that is not encrypted. The server must not send anything after its reply, and nothing has been read
    /// beyond it.
    fn ask_for_tls(&self) -> Result<(), NbdError> {
        self.send_option(OPT_STARTTLS, &[])?;
        let Reply { kind, data } = self.reply(OPT_STARTTLS)?;
        match kind {
            REP_ACK => Ok(()),
            REP_ERR_SHUTDOWN => Err(self.error_of(kind, &data)),
            kind if kind & REP_ERROR != 0 => {
                Err(NbdError::NoTls { address: self.uri.address.clone(), said: said(&data) })
            }
            kind => Err(self.protocol(format!("it answered a request for TLS with type {kind:#x}"))),
        }
    }

    fn export(&self, goal: Goal, no_zeroes: bool) -> Result<ExportInfo, NbdError> {
        self.send_option(OPT_STRUCTURED_REPLY, &[])?;
        let structured = self.reply(OPT_STRUCTURED_REPLY)?.kind == REP_ACK;
        let info = match self.go(goal, structured)? {
            Some(info) => info,
            None if goal == Goal::Information => {
                return Err(self.refused("it is too old to state an export's size (no NBD_OPT_INFO)", ""));
            }
            None => self.export_name(no_zeroes, structured)?,
        };
        if goal == Goal::Information {
            // The server may answer, or just end the connection.
            let _ = self.send_option(OPT_ABORT, &[]);
        }
        self.check(info)
    }

    /// Returns whether the server leaves out the zeroes of old times.
    fn greet(&self) -> Result<bool, NbdError> {
        let bytes: [u8; 18] = self.wire.receive_array().map_err(self.lost())?;
        let (greeting, style, flags) = (u64_at(&bytes, 0), u64_at(&bytes, 8), u16_at(&bytes, 16));
        if greeting != GREETING {
            return Err(self.protocol(format!("it begins with {greeting:#018x} instead of NBDMAGIC")));
        }
        if style != OPTION_MAGIC || flags & FIXED_NEWSTYLE == 0 {
            return Err(self.protocol(
                "it offers only an old form of negotiation: use a server with fixed newstyle".to_owned(),
            ));
        }
        let own = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
        self.wire.send(&own.to_be_bytes()).map_err(self.lost())?;
        Ok(flags & NO_ZEROES != 0)
    }

    /// `None`: the server does not know the option.
    fn go(&self, goal: Goal, structured: bool) -> Result<Option<ExportInfo>, NbdError> {
        let option = if goal == Goal::Transmission { OPT_GO } else { OPT_INFO };
        let name = self.uri.export.as_bytes();
        let length = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let wanted = [1_u16, INFO_BLOCK_SIZE].map(u16::to_be_bytes).concat();
        self.send_option(option, &[&length.to_be_bytes(), name, &wanted].concat())?;
        let (mut export, mut blocks) = (None, None);
        for _ in 0..MAX_REPLIES {
            let Reply { kind, data } = self.reply(option)?;
            match kind {
                REP_ACK => {
                    let missing = || self.protocol("it granted the export without its size".to_owned());
                    let (size_bytes, flags) = export.ok_or_else(missing)?;
                    let info = ExportInfo::new(size_bytes, flags, structured);
                    return Ok(Some(match blocks {
                        Some((min_block_bytes, preferred_block_bytes, max_block_bytes)) => {
                            ExportInfo { min_block_bytes, preferred_block_bytes, max_block_bytes, ..info }
                        }
                        None => info,
                    }));
                }
                REP_INFO if data.len() >= 2 => match (u16_at(&data, 0), data.len()) {
                    (INFO_EXPORT, 12) => export = Some((u64_at(&data, 2), u16_at(&data, 10))),
                    (INFO_BLOCK_SIZE, 14) => {
                        blocks = Some([2, 6, 10].map(|at| u32_at(&data, at)).into());
                    }
                    (INFO_EXPORT | INFO_BLOCK_SIZE, length) => {
                        return Err(self.protocol(format!("it described the export in {length} bytes")));
                    }
                    _ => {}
                },
                REP_ERR_UNSUP => return Ok(None),
                kind if kind & REP_ERROR != 0 => return Err(self.error_of(kind, &data)),
                kind => return Err(self.protocol(format!("it answered an option with type {kind:#x}"))),
            }
        }
        Err(self.protocol(format!("it sent more than {MAX_REPLIES} replies to one option")))
    }

    fn export_name(&self, no_zeroes: bool, structured: bool) -> Result<ExportInfo, NbdError> {
        self.send_option(OPT_EXPORT_NAME, self.uri.export.as_bytes())?;
        let bytes: [u8; 10] = self.wire.receive_array().map_err(|source| match source.kind() {
            // The only way in which such a server can refuse.
            io::ErrorKind::UnexpectedEof => self.no_export(""),
            _ => self.lost()(source),
        })?;
        if !no_zeroes {
            self.wire.receive(&mut [0; OLD_ZEROES]).map_err(self.lost())?;
        }
        Ok(ExportInfo::new(u64_at(&bytes, 0), u16_at(&bytes, 8), structured))
    }

    fn check(&self, info: ExportInfo) -> Result<ExportInfo, NbdError> {
        let unusable = |problem| NbdError::Unusable {
            address: self.uri.address.clone(),
            export: self.uri.export.clone(),
            problem,
        };
        if i64::try_from(info.size_bytes).is_err() {
            return Err(unusable(format!("it claims {} bytes; the limit is 2^63 - 1", info.size_bytes)));
        }
        let min = info.min_block_bytes;
        let max = if info.max_block_bytes == NO_MAX_BLOCK { DEFAULT_MAX_BLOCK } else { info.max_block_bytes };
        if !min.is_power_of_two() || min > MAX_MIN_BLOCK {
            return Err(unusable(format!(
                "its smallest block is {min} bytes; it must be a power of two up to {MAX_MIN_BLOCK}"
            )));
        }
        // The smallest allowed by proto.md is the preferred size; a maximum below the largest guest block could not
        // carry a request.
        if max < MAX_MIN_BLOCK || !max.is_multiple_of(min) {
            return Err(unusable(format!(
                "its largest request has {max} bytes; it must be a multiple of {min} and at least {MAX_MIN_BLOCK}"
            )));
        }
        let max_block_bytes = max.min(DEFAULT_MAX_BLOCK);
        let preferred_block_bytes = match info.preferred_block_bytes {
            preferred if preferred.is_power_of_two() && (min..=max).contains(&preferred) => preferred,
            _ => min,
        };
        Ok(ExportInfo { max_block_bytes, preferred_block_bytes, ..info })
    }

    fn send_option(&self, option: u32, data: &[u8]) -> Result<(), NbdError> {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let bytes =
            [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length.to_be_bytes(), data].concat();
        self.wire.send(&bytes).map_err(self.lost())
    }

    fn reply(&self, option: u32) -> Result<Reply, NbdError> {
        let header: [u8; 20] = self.wire.receive_array().map_err(self.lost())?;
        let (magic, to, kind, length) =
            (u64_at(&header, 0), u32_at(&header, 8), u32_at(&header, 12), u32_at(&header, 16));
        if magic != OPTION_REPLY_MAGIC || to != option {
            return Err(self.protocol(format!("it answered option {option} with {magic:#x}, option {to}")));
        }
        if length > MAX_REPLY_BYTES {
            return Err(self.protocol(format!(
                "its reply to option {option} has {length} bytes; the limit is {MAX_REPLY_BYTES}"
            )));
        }
        let mut data = vec![0; length as usize];
        self.wire.receive(&mut data).map_err(self.lost())?;
        Ok(Reply { kind, data })
    }

    fn error_of(&self, kind: u32, message: &[u8]) -> NbdError {
        let address = self.uri.address.clone();
        let said = said(message);
        match kind {
            REP_ERR_UNKNOWN => self.no_export(&said),
            REP_ERR_TLS_REQD => NbdError::TlsRequired { address, said },
            REP_ERR_SHUTDOWN => NbdError::ShuttingDown { address },
            REP_ERR_POLICY => self.refused("its policy forbids it", &said),
            REP_ERR_BLOCK_SIZE_REQD => {
                self.refused("it demands block sizes that this client did not ask for", &said)
            }
            _ => self.refused("it gives an error of another kind", &format!(" (type {kind:#x}){said}")),
        }
    }

    fn refused(&self, reason: &'static str, said: &str) -> NbdError {
        let (address, export) = (self.uri.address.clone(), self.uri.export.clone());
        NbdError::Refused { address, export, reason, said: said.to_owned() }
    }

    fn no_export(&self, said: &str) -> NbdError {
        let (address, export) = (self.uri.address.clone(), self.uri.export.clone());
        NbdError::NoExport { address, export, said: said.to_owned() }
    }

    fn protocol(&self, problem: String) -> NbdError {
        NbdError::Protocol { address: self.uri.address.clone(), problem }
    }

    fn lost(&self) -> impl Fn(io::Error) -> NbdError {
        let (address, timeout) = (self.uri.address.clone(), self.timeout);
        move |source| NbdError::Lost { address: address.clone(), timeout, source }
    }
}

/// The server's words, in brackets: at most [`SHOWN_BYTES`], without control characters.
fn said(message: &[u8]) -> String {
    let text = String::from_utf8_lossy(message.get(..SHOWN_BYTES).unwrap_or(message));
    let text: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.is_empty() { text } else { format!(" (it says: {text})") }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
