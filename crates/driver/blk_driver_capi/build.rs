//! Gives the shared library its soname: programs that were linked with one major version do not start with another.

fn main() {
    let major = env!("CARGO_PKG_VERSION_MAJOR");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbareblk_driver.so.{major}");
}
