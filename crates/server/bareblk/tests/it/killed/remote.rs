//! Kills of servers whose disk is an image in a Ceph cluster: the next server recognizes the lock of the killed one and
//! breaks it, instead of waiting until the cluster has noticed the death.

use super::{Copies, Disk, MIB, kills, random};
use crate::killed::load::{Overlap, Rings};
use crate::rig::Place;
use crate::rig::ceph::CephImage;

#[test]
fn nothing_is_lost_with_servers_that_are_killed_over_an_image_in_a_cluster() {
    let mut random = random();
    for rings in [Rings::Split, Rings::Packed] {
        let Some(image) = CephImage::new(4 * MIB) else { return };
        let (spec, conf) = (image.spec(), image.conf().display().to_string());
        let contents = Box::new(move || image.contents());
        let mut disk = Disk::with(Place::new(), spec.into(), &["--rbd-conf", &conf], Some(contents));
        kills(&mut disk, rings, Overlap::No, Copies::No, &mut random);
        assert!(disk.broken_locks > 0, "no server found the lock of its predecessor");
    }
}
