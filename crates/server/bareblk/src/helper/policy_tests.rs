//! What the sandbox's helper allows.

use super::*;

/// Allows images and sockets in these folders, besides what is named.
fn allowed(folders: &[&Path]) -> Allowed {
    let mut allowed = Allowed::default();
    let folders: Vec<OsString> = folders.iter().map(Into::into).collect();
    let policy = Policy {
        images: vec!["/named.raw".into()],
        readonly_images: vec!["/golden.raw".into()],
        sockets: vec!["/named.sock".into()],
        configuration: Some("/named.toml".into()),
        servers: vec![ServerAddress::Unix("/named.nbd".into())],
        credentials: vec!["/named.psk".into()],
        image_folders: folders.clone(),
        backing_folders: Vec::new(),
        socket_folders: folders,
        adopts: false,
        complete: true,
    };
    policy.pieces(1).into_iter().for_each(|piece| allowed.extend(piece.resolved()).unwrap());
    allowed
}

#[test]
fn without_folders_only_what_was_named_is_opened() {
    let allowed = allowed(&[]);
    let (image, socket) = (Path::new("/named.raw"), Path::new("/named.sock"));
    assert!(allowed.image(image, true).is_ok() && allowed.socket(socket).is_ok());
    assert!(
        allowed.image(Path::new("/etc/shadow"), true).is_err()
            && allowed.socket(Path::new("/run/x")).is_err()
    );
    assert!(allowed.configuration(Path::new("/named.toml")).is_ok());
    assert!(allowed.configuration(Path::new("/etc/shadow")).is_err());
}

#[test]
fn images_that_clients_add_lie_in_the_folders_allowed_whatever_links_say() {
    let folder = tempfile::tempdir().unwrap();
    let (inside, link) = (folder.path().join("disk.raw"), folder.path().join("link.raw"));
    std::fs::write(&inside, "x").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
    let allowed = allowed(&[folder.path()]);
    assert!(
        allowed.image(&inside, true).is_ok() && allowed.image(&folder.path().join("new.raw"), true).is_ok()
    );
    assert!(allowed.image(&link, true).is_err() && allowed.image(Path::new("/etc/passwd"), true).is_err());
    let up = folder.path().join("../up.raw");
    assert!(allowed.image(&up, true).is_err() && allowed.socket(&up).is_err());
    assert!(allowed.socket(&folder.path().join("s")).is_ok());
    std::fs::create_dir(folder.path().join("below")).unwrap();
    assert!(allowed.image(&folder.path().join("below/new.raw"), true).is_ok());
    assert!(allowed.socket(&folder.path().join("below/s")).is_err());
}

#[test]
fn images_below_folders_with_backing_files_are_only_read() {
    let folder = tempfile::tempdir().unwrap();
    let (inside, link) = (folder.path().join("base.raw"), folder.path().join("link.raw"));
    std::fs::write(&inside, "x").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
    let mut allowed = allowed(&[]);
    assert!(allowed.image(&inside, false).is_err());
    let text = format!("[[disk]]\nimage = '/a'\nbacking-folders = '/nowhere:{}'\n", folder.path().display());
    allowed.extend_backing_folders(Allowed::backing_folders_in(&text));
    assert_eq!(allowed.image(&inside, false).unwrap(), Found::Beside);
    let location = FileLocation::of(&std::fs::File::open(&inside).unwrap().into()).unwrap();
    assert!(allowed.image_beside(&inside, &location, false).is_ok());
    assert!(allowed.image(&inside, true).is_err() && allowed.image_beside(&inside, &location, true).is_err());
    assert!(allowed.image(&link, false).is_err() && allowed.image(Path::new("/etc/passwd"), false).is_err());
}

#[test]
fn what_was_settled_is_not_widened() {
    let mut allowed = allowed(&[]);
    assert!(allowed.extend(Policy { image_folders: vec!["/".into()], ..Policy::default() }).is_err());
    assert!(allowed.image(Path::new("/etc/passwd"), true).is_err());
}

#[test]
fn kernels_own_files_are_no_images() {
    assert!(allowed(&[Path::new("/")]).image(Path::new("/proc/self/mem"), true).is_err());
}

#[test]
fn file_read_again_adds_its_disks() {
    let mut allowed = allowed(&[]);
    allowed.extend_from_file("[[disk]]\nimage = \"/new.raw\"\nsocket = \"/new.sock\"\n");
    assert!(
        allowed.image(Path::new("/new.raw"), true).is_ok() && allowed.socket(Path::new("/new.sock")).is_ok()
    );
}

#[test]
fn credentials_are_those_of_disks_named_at_the_start_or_in_the_file() {
    let mut allowed = allowed(&[Path::new("/")]);
    let may_read = |allowed: &Allowed, path: &str| allowed.credentials(Path::new(path)).is_ok();
    assert!(may_read(&allowed, "/named.psk") && !may_read(&allowed, "/tls/ca-cert.pem"));
    allowed.extend_from_file("[[disk]]\nimage = \"nbds://storage/x?tls-certificates=/tls\"\n");
    assert!(
        ["ca-cert.pem", "client-cert.pem", "client-key.pem"]
            .iter()
            .all(|name| { may_read(&allowed, &format!("/tls/{name}")) })
    );
    assert!(!may_read(&allowed, "/tls/server-key.pem") && !may_read(&allowed, "/tls"));
}

#[test]
fn only_images_that_were_opened_are_opened_again() {
    let mut allowed = allowed(&[]);
    let file = FileId { dev: 1, ino: 2 };
    allowed.opened(Path::new("/named.raw"), FileLocation { real: "/named.raw".into(), file });
    assert!(allowed.reopen(FileId { dev: 1, ino: 2 }).is_ok());
    assert!(allowed.reopen(FileId { dev: 2, ino: 2 }).is_err());
}

#[test]
fn readonly_images_are_not_written_by_any_of_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let (golden, link) = (folder.path().join("golden.raw"), folder.path().join("link.raw"));
    std::fs::write(&golden, "x").unwrap();
    std::os::unix::fs::symlink(&golden, &link).unwrap();
    let mut allowed = allowed(&[folder.path()]);
    assert_eq!(allowed.image(Path::new("/golden.raw"), false).unwrap(), Found::Named);
    assert!(allowed.image(Path::new("/golden.raw"), true).is_err());
    let location = |path: &Path| FileLocation::of(&std::fs::File::open(path).unwrap().into()).unwrap();
    let may = |allowed: &Allowed, path: &Path, written| allowed.image_beside(path, &location(path), written);
    assert!(allowed.image(&golden, true).is_ok() && may(&allowed, &golden, true).is_ok());
    allowed.extend_from_file(&format!("[[disk]]\nimage = {golden:?}\nreadonly = true\n"));
    assert!(allowed.image(&golden, false).is_ok() && allowed.image(&link, false).is_ok());
    assert!(allowed.image(&golden, true).is_err() && may(&allowed, &link, true).is_err());
    // Once opened, the policy recognizes the file itself, under any name.
    let hard_link = folder.path().join("hard.raw");
    std::fs::hard_link(&golden, &hard_link).unwrap();
    allowed.opened(&golden, location(&golden));
    std::fs::rename(&link, &golden).unwrap();
    assert!(may(&allowed, &hard_link, true).is_err() && may(&allowed, &hard_link, false).is_ok());
}

#[test]
fn file_read_again_says_what_is_readonly_also_for_all_disks() {
    let mut allowed = allowed(&[]);
    let text =
        "[defaults]\nreadonly = true\n[[disk]]\nimage = '/a'\n[[disk]]\nimage = '/b'\nreadonly = false\n";
    allowed.extend_from_file(text);
    let written = |path| allowed.image(Path::new(path), true).is_ok();
    assert!(!written("/a") && allowed.image(Path::new("/a"), false).is_ok() && written("/b"));
}

#[test]
fn sockets_of_others_are_neither_changed_nor_removed_while_they_listen() {
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("own"), folder.path().join("other"));
    let _own = HostOpener.bind_socket(&own).unwrap();
    let listener = HostOpener.bind_socket(&other).unwrap();
    let id = |path| HostOpener.file_id(path).unwrap();
    let mut allowed = allowed(&[folder.path()]);
    allowed.bound(&own, id(&own));
    assert!(allowed.own_socket(&own, id(&own)).is_ok() && allowed.own_socket(&other, id(&other)).is_err());
    assert_eq!(allowed.unlink(&own).unwrap(), id(&own));
    assert!(allowed.unlink(&other).is_err());
    allowed.forget_bound(id(&own));
    assert!(allowed.unlink(&own).is_err());
    drop(listener);
    assert!(allowed.unlink(&other).is_ok());
}

#[test]
fn only_sockets_and_images_that_were_made_are_removed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut allowed = allowed(&[Path::new("/")]);
    assert!(allowed.unlink(file.path()).is_err() && allowed.forget_made(file.path()).is_none());
    let location = FileLocation::of(&file.as_file().try_clone().unwrap().into()).unwrap();
    allowed.made(file.path(), &location);
    assert_eq!(allowed.forget_made(file.path()), Some(location.file));
}

/// Another server's socket now has the name of one of our listeners, so our listener does not prove that the
/// socket is ours.
#[test]
fn socket_is_adopted_only_in_a_live_upgrade_and_not_where_one_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let mut allowed = allowed(&[folder.path()]);
    assert!(allowed.adopt_socket(&path).is_err());
    allowed.adopts = true;
    assert!(allowed.adopt_socket(&path).is_ok() && allowed.adopt_socket(Path::new("/s")).is_err());
    allowed.bound(&path, FileId { dev: 1, ino: 2 });
    assert!(allowed.adopt_socket(&path).is_err());
}
