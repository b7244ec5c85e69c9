//! The version with which a program was compiled, and the version with which it runs.

/// Version of this header: major << 16 | minor << 8 | patch.
pub const QSPIN_VERSION: u32 = 0x00_02_00;

/// Returns the version of the library that the program runs with, in the format of QSPIN_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn qspin_version() -> u32 {
    QSPIN_VERSION
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
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
        assert_eq!(qspin_version(), major << 16 | minor << 8 | patch);
    }
}
