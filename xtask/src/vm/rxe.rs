//! What scripts over rxe, Linux's software RoCEv2, need beside the kernel and its module.

use crate::peers::package;
use crate::process::find;
use std::path::Path;

/// Whether a script needs rxe.
pub(crate) fn is_used_by(script: &str) -> bool {
    script.starts_with("roce") || (script.starts_with("verbs-") && !script.contains("siw"))
}

/// What such a script needs and this machine lacks, as half a sentence.
pub(crate) fn missing() -> Option<String> {
    if let Some(program) = PROGRAMS.iter().find(|program| find(program).is_none()) {
        return Some(match package(program) {
            Some(package) => format!("no {program}, Debian package {package}"),
            None => format!("no {program}"),
        });
    }
    let file = PROVIDER.iter().find(|file| !Path::new(file).exists())?;
    Some(format!("no {file}, Debian package ibverbs-providers"))
}

/// Programs of the guest; this `ip` knows network namespaces, which that of busybox does not.
pub(crate) const PROGRAMS: &[&str] = &["rping", "ib_send_bw", "ib_read_bw", "ib_write_bw", "ip", "tc"];

/// libibverbs' provider of rxe.
pub(crate) const PROVIDER: &[&str] =
    &["/etc/libibverbs.d/rxe.driver", "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_program_is_in_a_package_that_make_test_installs() {
        let always_there = ["ip", "tc"];
        for program in PROGRAMS.iter().filter(|program| !always_there.contains(program)) {
            assert!(package(program).is_some(), "{program}");
        }
    }
}
