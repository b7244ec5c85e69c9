//! Clusters that are read from one image and written to the one below it.

use super::plain::Plain;
use crate::DiskFormat;
use crate::check::check;
use crate::create::{NewImage, create, remove_backing};
use crate::image::Image;
use crate::write::{Allocation, Below, Writer};

const CLUSTER: u64 = 64 << 10;
/// The last cluster ends inside of a block.
const SIZE: u64 = 9 * CLUSTER + 512;

/// A backing file of one byte value.
struct All(u8);

impl Below for All {
    fn read_at(&mut self, _: u64, buffer: &mut [u8]) -> std::io::Result<()> {
        buffer.fill(self.0);
        Ok(())
    }

    fn is_zero(&mut self) -> bool {
        self.0 == 0
    }
}

fn new_image() -> Writer<Plain> {
    let file = Plain::default();
    create(&file, &NewImage { size_bytes: SIZE, backing: Some((b"below", DiskFormat::Raw)) }).unwrap();
    Writer::open(file).unwrap()
}

fn read(writer: &mut Writer<Plain>, cluster: u64, below: u8) -> Vec<u8> {
    let mut content = vec![0xee; CLUSTER as usize];
    writer.read_cluster(cluster, &mut All(below), &mut content).unwrap();
    content
}

fn sound(mut writer: Writer<Plain>) -> Plain {
    writer.close().unwrap();
    let image = Image::open(writer.file()).unwrap();
    let report = check(&image, &mut |found| panic!("{found}")).unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0));
    let bytes = writer.file().bytes.borrow().clone();
    Plain { bytes: bytes.into(), ..Plain::default() }
}

#[test]
fn each_kind_of_cluster_arrives_in_the_image_below() {
    let (mut top, mut base) = (new_image(), new_image());
    top.overwrite(CLUSTER, &vec![1; 2 * CLUSTER as usize], &mut All(5), &mut ()).unwrap();
    top.overwrite(9 * CLUSTER, &vec![3; CLUSTER as usize], &mut All(5), &mut ()).unwrap();
    top.zero(4 * CLUSTER..5 * CLUSTER, true, &mut All(5), &mut ()).unwrap();
    base.overwrite(2 * CLUSTER, &[7; 4096], &mut All(9), &mut ()).unwrap();
    for cluster in 0..10 {
        match top.allocation(cluster).unwrap().0 {
            Allocation::Unallocated => assert!([0, 3, 5, 6, 7, 8].contains(&cluster), "{cluster}"),
            Allocation::Zero => {
                assert_eq!(cluster, 4);
                let range = cluster * CLUSTER..(cluster + 1) * CLUSTER;
                base.zero(range, false, &mut All(9), &mut ()).unwrap();
            }
            Allocation::Data { needs_below } => {
                assert!(!needs_below && [1, 2, 9].contains(&cluster), "{cluster}");
                let content = read(&mut top, cluster, 5);
                base.overwrite(cluster * CLUSTER, &content, &mut All(9), &mut ()).unwrap();
            }
        }
    }
    for (cluster, value) in [(0, 9), (1, 1), (2, 1), (3, 9), (4, 0), (8, 9)] {
        assert_eq!(read(&mut base, cluster, 9), vec![value; CLUSTER as usize], "{cluster}");
    }
    let last = read(&mut base, 9, 9);
    assert!(last[..512].iter().all(|byte| *byte == 3) && last[512..].iter().all(|byte| *byte == 0));
    sound(top);
    sound(base);
}

#[test]
fn part_of_a_cluster_keeps_the_rest_of_what_lies_below() {
    let mut image = new_image();
    image.overwrite(CLUSTER + 4096, &[1; 8192], &mut All(5), &mut ()).unwrap();
    let content = read(&mut image, 1, 0);
    assert!(content[..4096].iter().all(|byte| *byte == 5));
    assert!(content[4096..12_288].iter().all(|byte| *byte == 1));
    assert!(content[12_288..].iter().all(|byte| *byte == 5));
    let file = sound(image);
    remove_backing(&file).unwrap();
    let mut image = Writer::open(file).unwrap();
    assert_eq!(read(&mut image, 1, 0), content);
    assert_eq!(read(&mut image, 0, 0), vec![0; CLUSTER as usize]);
}

/// An entry that no guest has asked for does not end the changes of others.
#[test]
fn damaged_entry_fails_the_job_and_nothing_else() {
    let mut image = new_image();
    image.overwrite(0, &[1; 4096], &mut All(5), &mut ()).unwrap();
    let table = image.l1()[0] & 0x00ff_ffff_ffff_fe00;
    let file = sound(image);
    let entry = (1_u64 << 63 | 1 << 40).to_be_bytes();
    let at = usize::try_from(table).unwrap() + 3 * 8;
    file.bytes.borrow_mut()[at..at + 8].copy_from_slice(&entry);
    let mut image = Writer::open(file).unwrap();
    assert!(image.allocation(3).is_err());
    assert!(image.read_cluster(3, &mut All(5), &mut vec![0; CLUSTER as usize]).is_err());
    image.overwrite(CLUSTER, &[1; 4096], &mut All(5), &mut ()).unwrap();
}

/// A claim has copied more of the backing file than the disk had.
#[test]
fn what_lies_behind_the_end_does_not_show_when_the_disk_grows() {
    let mut image = new_image();
    image.overwrite(9 * CLUSTER, &[1; 4096], &mut All(5), &mut ()).unwrap();
    image.grow_disk(SIZE + CLUSTER, &mut All(0), 0, &mut ()).unwrap();
    let content = read(&mut image, 9, 0);
    assert!(content[..512].iter().all(|byte| *byte == 1) && content[512..].iter().all(|byte| *byte == 0));
    let file = sound(image);
    // A resize of which the guest does not know.
    let mut image = Writer::open(file).unwrap();
    image.limit_disk(SIZE);
    assert_eq!(image.header().size_bytes, SIZE);
    image.zero(9 * CLUSTER..SIZE, true, &mut All(0), &mut ()).unwrap();
    assert_eq!(read(&mut image, 9, 0), vec![0; CLUSTER as usize]);
}
