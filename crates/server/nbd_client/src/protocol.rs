//! The protocol's numbers (`doc/proto.md`), all in network byte order.

/// "NBDMAGIC", the first bytes that a server sends.
pub(crate) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// "IHAVEOPT": fixed newstyle negotiation follows, and also the start of each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags of both sides.
pub(crate) const FIXED_NEWSTYLE: u16 = 1;
pub(crate) const NO_ZEROES: u16 = 2;

pub(crate) const OPT_EXPORT_NAME: u32 = 1;
pub(crate) const OPT_ABORT: u32 = 2;
pub(crate) const OPT_STARTTLS: u32 = 5;
pub(crate) const OPT_INFO: u32 = 6;
pub(crate) const OPT_GO: u32 = 7;
pub(crate) const OPT_STRUCTURED_REPLY: u32 = 8;

pub(crate) const REP_ACK: u32 = 1;
pub(crate) const REP_INFO: u32 = 3;
pub(crate) const REP_ERROR: u32 = 1 << 31;
pub(crate) const REP_ERR_UNSUP: u32 = REP_ERROR | 1;
pub(crate) const REP_ERR_POLICY: u32 = REP_ERROR | 2;
pub(crate) const REP_ERR_TLS_REQD: u32 = REP_ERROR | 5;
pub(crate) const REP_ERR_UNKNOWN: u32 = REP_ERROR | 6;
pub(crate) const REP_ERR_SHUTDOWN: u32 = REP_ERROR | 7;
pub(crate) const REP_ERR_BLOCK_SIZE_REQD: u32 = REP_ERROR | 8;

pub(crate) const INFO_EXPORT: u16 = 0;
pub(crate) const INFO_BLOCK_SIZE: u16 = 3;

/// Transmission flags of an export.
pub(crate) const FLAG_READ_ONLY: u16 = 1 << 1;
pub(crate) const FLAG_SEND_FLUSH: u16 = 1 << 2;
pub(crate) const FLAG_SEND_FUA: u16 = 1 << 3;
pub(crate) const FLAG_ROTATIONAL: u16 = 1 << 4;
pub(crate) const FLAG_SEND_TRIM: u16 = 1 << 5;
pub(crate) const FLAG_SEND_WRITE_ZEROES: u16 = 1 << 6;
pub(crate) const FLAG_CAN_MULTI_CONN: u16 = 1 << 8;

pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub(crate) const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

pub(crate) const CMD_READ: u16 = 0;
pub(crate) const CMD_WRITE: u16 = 1;
pub(crate) const CMD_DISC: u16 = 2;
pub(crate) const CMD_FLUSH: u16 = 3;
pub(crate) const CMD_TRIM: u16 = 4;
pub(crate) const CMD_WRITE_ZEROES: u16 = 6;
pub(crate) const CMD_FLAG_FUA: u16 = 1;
pub(crate) const CMD_FLAG_NO_HOLE: u16 = 2;

pub(crate) const REPLY_FLAG_DONE: u16 = 1;
pub(crate) const REPLY_NONE: u16 = 0;
pub(crate) const REPLY_OFFSET_DATA: u16 = 1;
pub(crate) const REPLY_OFFSET_HOLE: u16 = 2;
/// Set in the types of all error chunks.
pub(crate) const REPLY_ERROR_BIT: u16 = 1 << 15;

/// The server is about to end: the request was not carried out.
pub(crate) const ESHUTDOWN: u32 = 108;

/// The number that begins at `at`.
///
/// # Panics
/// If the bytes are not there. The same holds for the other two functions.
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes[at..at + 2].iter().fold(0, |number, byte| number << 8 | u16::from(*byte))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}
