//! What `serve` was told on its command line becomes a configuration: of one disk, or what a file says.
//!
//! Not here: the options (`serve_args.rs`), the file (`config_file.rs`).

use anyhow::{Result, anyhow};
use disk_image::HostOpener;

use crate::args::serve_args::ServeArgs;
use crate::config::config_file;
use crate::config::configuration::Configuration;
use crate::config::disk_settings::DiskSettings;

impl ServeArgs {
    /// Reads the file if there is one; the rest is checked already.
    pub fn configuration(self) -> Result<Configuration> {
        if let Some(path) = self.config {
            return Ok(config_file::read(&path, &[], &HostOpener)?);
        }
        // clap asks for both; this remains true if its rules change.
        let image = self.image.ok_or_else(|| anyhow!("no image is given"))?;
        let socket = self.socket.ok_or_else(|| anyhow!("no --socket is given"))?;
        let mut disk = DiskSettings::new(image, socket, self.disk)?;
        // Disks added by way of the control socket may have other engines.
        disk.engine_config.pollable = self.server.control.is_some();
        Ok(Configuration { disks: vec![disk], server: self.server.into(), file: None })
    }
}
