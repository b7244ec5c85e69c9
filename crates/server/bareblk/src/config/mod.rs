//! All that a server is to serve: from the command line or a file, checked as a whole, compared with what runs.
//!
//! Not here: options and values (`args`), acting on it (`serving`).

pub(crate) mod config_file;
pub(crate) mod config_words;
pub(crate) mod configuration;
pub(crate) mod difference;
pub(crate) mod disk_settings;
pub(crate) mod serve_configuration;
