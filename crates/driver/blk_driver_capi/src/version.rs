//! The version that a program was compiled with, and the version that it runs with.

/// Version of this header, as major << 16 | minor << 8 | patch.
pub const BAREBLK_VERSION: u32 = 0x00_02_00;

/// Returns the version of the library that the program runs with, in the format of BAREBLK_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn bareblk_version() -> u32 {
    BAREBLK_VERSION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_that_of_the_package() {
        let [major, minor, patch] = [
            env!("CARGO_PKG_VERSION_MAJOR"),
            env!("CARGO_PKG_VERSION_MINOR"),
            env!("CARGO_PKG_VERSION_PATCH"),
        ]
        .map(|part| part.parse::<u32>().unwrap());
        assert_eq!(bareblk_version(), major << 16 | minor << 8 | patch);
    }
}
