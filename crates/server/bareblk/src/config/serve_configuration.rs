//! Turns the command line of `serve` into a configuration: of one disk, or of the disks in a file.

use anyhow::{Result, anyhow};
use disk_image::HostOpener;

use crate::args::serve_args::ServeArgs;
use crate::config::config_file;
use crate::config::configuration::{Configuration, ServerSettings};
use crate::config::disk_settings::DiskSettings;

impl ServeArgs {
    /// Reads the file, if there is one. clap has already checked the rest.
    pub fn configuration(self) -> Result<Configuration> {
        if let Some(path) = self.config {
            return Ok(config_file::read(&path, &[], &HostOpener)?);
        }
        // clap requires both options; these errors guard against a change of its rules.
        let image = self.image.ok_or_else(|| anyhow!("no image is given"))?;
        let socket = self.socket.ok_or_else(|| anyhow!("no --socket is given"))?;
        let mut disk = DiskSettings::new(image, socket, self.disk)?;
        // A control client may later add disks with other engines.
        disk.engine_config.pollable = self.server.control.is_some();
        let (disks, server, groups) = (vec![disk], ServerSettings::new(self.server), Vec::new());
        Ok(Configuration { disks, server, groups, file: None })
    }
}
