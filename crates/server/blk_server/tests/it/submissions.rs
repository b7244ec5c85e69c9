//! A server with counting enabled counts each submission once; other servers count none.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use crate::rig::{Options, Rig, feature, ready};

#[test]
fn every_request_is_counted_once() {
    let rig = Rig::start(Options { counting: true, ..Options::buffered() });
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    let server = rig.server.as_ref().unwrap();
    (0..10).for_each(|sector| assert_eq!(guest.write(sector, &[7; 512]).status, Some(0)));
    let first = server.submissions().unwrap();
    (0..7).for_each(|sector| assert_eq!(guest.read(sector, 512).status, Some(0)));
    let second = server.submissions().unwrap().since(first);
    assert_eq!((first.requests, second.requests), (10, 7));
    assert!(second.mean_us().unwrap() > 0.0);
}

#[test]
fn server_that_was_not_asked_counts_nothing() {
    let rig = Rig::start(Options::buffered());
    let (_front_end, mut guest) = ready(&rig, feature::USUAL);
    assert_eq!(guest.write(0, &[7; 512]).status, Some(0));
    assert_eq!(rig.server.as_ref().unwrap().submissions(), None);
}
