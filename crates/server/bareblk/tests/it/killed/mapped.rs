//! Kills of servers whose disk is a qcow2 image that grows: what a killed server leaves has leaks at most, and every
//! acknowledged write.

use super::{Copies, Disk, kills, random};
use crate::killed::load::{Overlap, Rings};
use crate::qcow2::{assert_consistent, content_in, folder, tool};
use crate::rig::Place;

#[test]
fn nothing_is_lost_with_servers_that_are_killed_while_a_qcow2_image_grows() {
    let mut random = random();
    // With small clusters, nearly every write changes the tables. Over a backing file, it copies first.
    for (rings, overlap, words) in [
        (Rings::Split, Overlap::No, &["-o", "cluster_size=4k"][..]),
        (Rings::Packed, Overlap::Yes, &[]),
        (Rings::Split, Overlap::Yes, &["-b", "base.raw", "-F", "raw"]),
    ] {
        let place = Place::new();
        let folder = folder(&place);
        let image = place.path("a.qcow2");
        std::fs::File::create(place.path("base.raw")).unwrap().set_len(3 << 20).unwrap();
        let words = [&["create", "-q", "-f", "qcow2"], words, &["a.qcow2", "4M"]].concat();
        if tool(&place, "qemu-img", &words).is_none() {
            return;
        }
        let folders = folder.display().to_string();
        let mut disk = Disk::with(
            place,
            image,
            &["--format", "qcow2", "--workers", "2", "--backing-folders", &folders],
            Some(Box::new(move || {
                assert_consistent(&folder, "a.qcow2", true);
                content_in(&folder, "a.qcow2")
            })),
        );
        kills(&mut disk, rings, overlap, Copies::No, &mut random);
    }
}
