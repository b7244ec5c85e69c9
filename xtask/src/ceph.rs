//! `cargo xtask ceph`: a Ceph cluster of one monitor and one OSD, from Debian's packages, for development and for readers
//! of docs/how-to/ceph.md.
//!
//! Everything is below one folder. Not here: how the cluster is started and stopped (`ceph_cluster`).

use std::path::PathBuf;

use anyhow::Result;
use ceph_cluster::{Cluster, Store};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum What {
    /// Starts a new cluster below a folder, with a pool `rbd` and an image `rbd/disk` of 1 GiB
    Up {
        /// The folder; data of an earlier cluster in it is removed
        folder: PathBuf,
        /// How the OSD stores data; memstore loses it when the OSD ends
        #[arg(long, value_enum, default_value_t = StoreName::Bluestore)]
        store: StoreName,
        /// The monitor's port on 127.0.0.1
        #[arg(long, default_value_t = 16789)]
        port: u16,
    },
    /// Stops the cluster below a folder: first the OSD, then the monitor
    Down {
        /// The folder
        folder: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum StoreName {
    Bluestore,
    Memstore,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let (folder, store, port) = match &args.what {
        What::Down { folder } => return Ok(Cluster::at(folder)?.stop()?),
        What::Up { folder, store: StoreName::Bluestore, port } => (folder, Store::Bluestore, *port),
        What::Up { folder, store: StoreName::Memstore, port } => (folder, Store::Memstore, *port),
    };
    let cluster = Cluster::start(folder, folder, store, Some(port), &mut |step| println!("{step}"))?;
    if let Err(error) = cluster.create_image("disk", 1 << 30) {
        let _ = cluster.stop();
        return Err(error.into());
    }
    let (conf, folder) = (cluster.configuration(), cluster.folder());
    let (conf, folder) = (conf.display(), folder.display());
    println!("the cluster runs; serve its image with");
    println!("  bareblk serve rbd:rbd/disk --rbd-conf {conf} --socket /tmp/disk.sock");
    println!("its tools (rbd, ceph): . {folder}/env; stop it: cargo xtask ceph down {folder}");
    Ok(())
}
