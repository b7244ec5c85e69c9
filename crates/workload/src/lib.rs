//! Loads in the words of fio, on a vhost-user-blk socket or a file, and what they measured.
//!
//! Not here: experiments and reports (`lab`), the command line (`bareblk`).
#![forbid(unsafe_code)]
