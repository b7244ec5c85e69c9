//! All settings of a server: read from the command line or a file, checked as a whole, compared with the running ones.

pub(crate) mod config_file;
pub(crate) mod config_words;
pub(crate) mod configuration;
pub(crate) mod difference;
pub(crate) mod disk_settings;
pub(crate) mod serve_configuration;
