//! Gives the shared library a soname with its major version, so that a program does not start with another one.

fn main() {
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbareblk_driver.so.{major}");
}
