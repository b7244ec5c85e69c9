//! Runs the machine's C compiler with the library that cargo built for this test.
//!
//! Rust links with `cc` too, so a machine without it cannot build these tests, unless its linker has another name:
//! there these tests say so and do nothing.
#![allow(dead_code, missing_debug_implementations, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xtask::skip::{Reason, skip};

/// Flags of every compilation.
const STRICT: &[&str] = &["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Werror", "-pedantic"];

/// The language standards that the header supports, oldest first.
pub const C: &[&str] = &["-std=c11", "-std=c17"];
pub const CPP: &[&str] = &["-std=c++11", "-std=c++14", "-std=c++17", "-std=c++20"];

/// The soname of the shared library.
pub const SONAME: &str = concat!("libqspin.so.", env!("CARGO_PKG_VERSION_MAJOR"));

pub struct Compiler {
    program: String,
}

/// Returns `None`, with a message, if there is no compiler.
pub fn find() -> Option<Compiler> {
    let program = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let runs = Command::new(&program).arg("--version").stdout(Stdio::null()).status().is_ok();
    if !runs {
        skip(Reason::NoCompiler("c".into()), &program);
    }
    runs.then_some(Compiler { program })
}

impl Compiler {
    /// The C compiler may be installed without the C++ compiler.
    pub fn knows_cpp(&self) -> bool {
        let empty = ["-x", "c++", "-fsyntax-only", "/dev/null"];
        let knows = Command::new(&self.program).args(empty).output().unwrap().status.success();
        if !knows {
            skip(Reason::NoCompiler("c++".into()), &self.program);
        }
        knows
    }

    /// Compiles only `header`.
    pub fn check(&self, standard: &str, header: &str) {
        self.run(
            Command::new(&self.program).args(language(standard)).args(STRICT).args(["-fsyntax-only", header]),
        );
    }

    /// Compiles `source` (in the crate's folder) to a program in `folder` that uses the shared library.
    pub fn link_shared(&self, standard: &str, source: &str, folder: &Path) -> PathBuf {
        let libraries = built("libqspin.so");
        // The program finds the library by its soname, as on a machine where the library is installed.
        std::os::unix::fs::symlink(&libraries, folder.join(SONAME)).unwrap();
        let libraries = libraries.parent().unwrap().display();
        let search = [format!("-L{libraries}"), format!("-Wl,-rpath,{}", folder.display())];
        self.link(standard, source, folder, |command| command.args(&search).args(["-lqspin", "-lpthread"]))
    }

    /// Compiles `source` to a program that contains the static library.
    pub fn link_static(&self, standard: &str, source: &str, folder: &Path) -> PathBuf {
        // The system libraries that Rust's standard library needs.
        let system = ["-lgcc_s", "-lpthread", "-lm", "-ldl"];
        let archive = built("libqspin.a");
        self.link(standard, source, folder, |command| command.arg(archive).args(system))
    }

    fn link(
        &self,
        standard: &str,
        source: &str,
        folder: &Path,
        libraries: impl FnOnce(&mut Command) -> &mut Command,
    ) -> PathBuf {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
        let program = folder.join(source.file_stem().unwrap());
        let mut command = Command::new(&self.program);
        // The header needs only standard C. Programs also need the clocks of POSIX.
        command.args(language(standard)).args(STRICT).args(["-O1", "-D_GNU_SOURCE"]);
        command
            .args(["-I", concat!(env!("CARGO_MANIFEST_DIR"), "/include"), "-o"])
            .arg(&program)
            .arg(&source);
        libraries(command.args(["-x", "none"])); // reset: the archive is not source code
        self.run(&mut command);
        program
    }

    fn run(&self, command: &mut Command) {
        let output = command.output().unwrap();
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && complaints.is_empty(), "{command:?}\n{complaints}");
    }
}

fn language(standard: &str) -> [&str; 3] {
    let language = if standard.contains("c++") { "c++" } else { "c" };
    ["-x", language, standard]
}

/// Returns the path of a built file of the library. Cargo writes it next to the test's own program (`deps`). Only
/// `cargo build` copies it one folder higher, and that copy may be older than the last change.
pub fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let places = test.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = places.clone().find(|place| place.is_file());
    found.unwrap_or_else(|| panic!("cargo has left no library at any of {:?}", places.collect::<Vec<_>>()))
}
