//! Other programs that attaching needs.

use std::env;
use std::ffi::OsStr;

/// Whether a program is installed, where a shell would find it.
#[must_use]
pub fn is_installed(program: &str) -> bool {
    is_in(&env::var_os("PATH").unwrap_or_default(), program)
}

fn is_in(path: &OsStr, program: &str) -> bool {
    env::split_paths(path).any(|directory| directory.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_program_is_a_file_in_any_directory_of_the_path() {
        let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::write(second.path().join("fusermount3"), "").unwrap();
        fs::create_dir(first.path().join("nbd-client")).unwrap();
        let path = env::join_paths([first.path(), second.path()]).unwrap();
        assert!(is_in(&path, "fusermount3"));
        assert!(!is_in(&path, "nbd-client"), "it is a directory");
        assert!(!is_in(OsStr::new(""), "fusermount3"));
    }
}
