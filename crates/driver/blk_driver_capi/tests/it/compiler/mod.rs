//! The machine's C compiler, and the library that cargo built for this test.
//!
//! Rust links with `cc` too, so it exists wherever tests run, except on machines whose linker has another name: there
//! these tests are skipped.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xtask::skip::{Reason, skip};

/// The options for every compilation.
const STRICT: &[&str] = &["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-pedantic"];

/// The shared library's soname, which programs that link with it need.
pub const SONAME: &str = concat!("libbareblk_driver.so.", env!("CARGO_PKG_VERSION_MAJOR"));

pub struct Compiler {
    program: String,
}

/// `None` if there is no compiler; then prints the reason.
pub fn find() -> Option<Compiler> {
    let program = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let runs = Command::new(&program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !runs {
        skip(Reason::NoCompiler("c".into()), &program);
    }
    runs.then_some(Compiler { program })
}

impl Compiler {
    /// Some C compilers come without C++.
    pub fn knows_cpp(&self) -> bool {
        let empty = ["-x", "c++", "-fsyntax-only", "/dev/null"];
        let knows = Command::new(&self.program).args(empty).output().unwrap().status.success();
        if !knows {
            skip(Reason::NoCompiler("c++".into()), &self.program);
        }
        knows
    }

    /// Compiles only `header`.
    pub fn check(&self, language: &[&str], header: &str) {
        self.run(Command::new(&self.program).args(language).args(STRICT).args(["-fsyntax-only", header]));
    }

    /// Links `source` (in the crate's folder) with the shared library into a program in `folder`.
    pub fn link_shared(&self, source: &str, folder: &Path) -> PathBuf {
        let libraries = built("libbareblk_driver.so");
        // The program looks for the library by its soname, as on a machine where it is installed.
        std::os::unix::fs::symlink(&libraries, folder.join(SONAME)).unwrap();
        let libraries = libraries.parent().unwrap().display();
        let search = [format!("-L{libraries}"), format!("-Wl,-rpath,{}", folder.display())];
        self.link(source, folder, |command| command.args(&search).arg("-lbareblk_driver"))
    }

    /// Links `source` with the static library.
    pub fn link_static(&self, source: &str, folder: &Path) -> PathBuf {
        // System libraries that Rust's standard library needs.
        let system = ["-lgcc_s", "-lpthread", "-lm", "-ldl"];
        let archive = built("libbareblk_driver.a");
        self.link(source, folder, |command| command.arg(archive).args(system))
    }

    fn link(
        &self,
        source: &str,
        folder: &Path,
        libraries: impl FnOnce(&mut Command) -> &mut Command,
    ) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
        let program = folder.join(source.file_stem().unwrap());
        let mut command = Command::new(&self.program);
        command.arg("-std=c11").args(STRICT).arg("-O1");
        command
            .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/include"), "-o"])
            .arg(&program)
            .arg(&source);
        libraries(&mut command);
        self.run(&mut command);
        program
    }

    fn run(&self, command: &mut Command) {
        let output = command.output().unwrap();
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{command:?}\n{complaints}");
    }
}

/// A library that cargo built. Beside the test program (`deps`) it is current; `cargo build` also copies it one folder
/// higher, where it may be older than the last change.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("cargo has left no library at any of {:?}", places.collect::<Vec<_>>()))
}
