//! `contrib/toolchain.sh` on machines that lack something: PATH has only what a test puts there.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Programs of every Debian that the script calls.
const ESSENTIAL: &[&str] = &[
    "awk", "cat", "cut", "df", "dirname", "du", "grep", "head", "mkdir", "mktemp", "realpath", "rm", "sed",
    "sh", "sort",
];

/// A C compiler whose program says that io_uring is permitted.
const COMPILER: &str = "printf '#!/bin/sh\\necho ok\\n' >\"$2\" && chmod +x \"$2\"";
const CARGO: &str = "echo 'cargo 99.0.0 (0 2026-01-01)'";

/// A machine with the essential programs and those that a test adds as shell scripts.
struct Machine(TempDir);

impl Machine {
    fn new() -> Machine {
        let directory = tempfile::tempdir().unwrap();
        for program in ESSENTIAL {
            let found = ["/usr/bin", "/bin"]
                .iter()
                .map(|bin| Path::new(bin).join(program))
                .find(|path| path.exists());
            symlink(found.unwrap_or_else(|| panic!("no {program}")), directory.path().join(program)).unwrap();
        }
        Machine(directory).with("id", "echo 1000")
    }

    fn with(self, program: &str, script: &str) -> Machine {
        let path = self.0.path().join(program);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        self
    }

    /// An apt that records what it installs, whose `cargo` is old and whose `cargo-web` is new.
    fn with_apt(self) -> Machine {
        let bin = self.0.path().display().to_string();
        self.with("apt-cache", "if [ \"$2\" = cargo ]; then echo '  Candidate: 1.85.1'; else echo '  Candidate: 98.0.0'; fi").with(
            "apt-get",
            &format!(
                "[ \"$1\" = update ] || echo \"$@\" >>{bin}/installed\n\
                 case \"$*\" in\n*cargo-web*) printf \"#!/bin/sh\\necho cargo 98.0.0\\n\" >{bin}/cargo; file={bin}/cargo ;;\n\
                 *gcc*) printf '%s\\n' '#!/bin/sh' 'printf \"#!/bin/sh\\necho ok\\n\" >$2; chmod +x $2' >{bin}/cc; file={bin}/cc ;;\n\
                 *) exit 0 ;;\nesac\n/usr/bin/chmod +x $file"
            ),
        )
    }

    /// Runs the script, and returns whether it succeeded and what it said.
    fn check(&self, memory_mib: &str, disk_mib: &str) -> (bool, String) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../contrib/toolchain.sh");
        let bin = self.0.path();
        symlink("/usr/bin/chmod", bin.join("chmod")).unwrap();
        let output = Command::new("sh")
            .arg(script)
            .args([memory_mib, disk_mib])
            .env("PATH", bin)
            .env("CARGO_TARGET_DIR", bin.join("target"))
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }

    fn refuses(&self) -> String {
        let (succeeds, said) = self.check("1", "1");
        assert!(!succeeds);
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }
}

#[test]
fn a_machine_with_everything_hears_nothing() {
    let machine = Machine::new().with("cc", COMPILER).with("cargo", CARGO);
    assert_eq!(machine.check("1", "1"), (true, String::new()));
}

#[test]
fn a_missing_compiler_is_named_with_the_command_that_installs_it() {
    let said = Machine::new().with("cargo", CARGO).refuses();
    assert_eq!(
        said,
        "error: there is no C compiler; on Debian or Ubuntu type: sudo apt-get install gcc libc6-dev\n"
    );
}

#[test]
fn a_kernel_that_refuses_io_uring_is_named_before_the_build() {
    let compiler = COMPILER.replace("echo ok", "echo Operation not permitted");
    let said = Machine::new().with("cc", &compiler).with("cargo", CARGO).refuses();
    assert!(said.starts_with("error: the kernel refuses io_uring (Operation not permitted): "), "{said}");
}

#[test]
fn a_missing_cargo_is_named_with_the_command_that_installs_it() {
    let said = Machine::new().with("cc", COMPILER).refuses();
    assert!(said.starts_with("error: there is no cargo; type: curl "), "{said}");
}

#[test]
fn an_old_cargo_is_named_with_its_version() {
    let machine = Machine::new().with("cc", COMPILER).with("cargo", "echo 'cargo 1.63.0'");
    assert!(machine.refuses().starts_with("error: cargo 1.63.0 is too old: Blockmux needs 1."));
}

#[test]
fn an_old_cargo_of_rustup_is_updated_by_rustup() {
    let machine = Machine::new().with("cc", COMPILER).with("cargo", "echo 'cargo 1.63.0'").with("rustup", "");
    assert!(machine.refuses().ends_with("; type: rustup update stable\n"));
}

#[test]
fn a_cargo_of_rustup_without_a_toolchain_is_named() {
    let machine = Machine::new().with("cc", COMPILER).with("cargo", "exit 1").with("rustup", "");
    assert_eq!(machine.refuses(), "error: 'cargo --version' fails; type: rustup default stable\n");
}

#[test]
fn too_little_memory_or_disk_is_named_with_what_the_build_needs() {
    let machine = || Machine::new().with("cc", COMPILER).with("cargo", CARGO);
    let (succeeds, said) = machine().check("999999999", "1");
    assert!(
        !succeeds && said.ends_with(" MiB of memory are free, and the build needs 999999999\n"),
        "{said}"
    );
    let (succeeds, said) = machine().check("1", "999999999999");
    assert!(
        !succeeds
            && said.contains("and the build needs 999999999999; CARGO_TARGET_DIR=PATH builds elsewhere")
    );
}

#[test]
fn root_on_debian_gets_a_compiler_and_the_first_cargo_that_is_new_enough() {
    if !Path::new("/etc/debian_version").exists() {
        println!("skipped: contrib/toolchain.sh with apt (not a Debian)");
        return;
    }
    let machine = Machine::new().with_apt().with("id", "echo 0");
    let (succeeds, said) = machine.check("1", "1");
    assert!(succeeds, "{said}");
    assert_eq!(said, "installing gcc libc6-dev\ninstalling cargo-web ca-certificates\n");
    let installed = fs::read_to_string(machine.0.path().join("installed")).unwrap();
    assert_eq!(installed.lines().count(), 2, "{installed}");
}

#[test]
fn a_user_on_debian_is_told_all_that_root_would_install_in_one_line() {
    if !Path::new("/etc/debian_version").exists() {
        println!("skipped: contrib/toolchain.sh with apt (not a Debian)");
        return;
    }
    for (machine, missing, packages) in [
        (Machine::new().with("cc", COMPILER), "no cargo", "cargo-web ca-certificates"),
        (Machine::new().with("cargo", CARGO), "no C compiler", "gcc libc6-dev"),
        (Machine::new(), "no C compiler and no cargo", "gcc libc6-dev cargo-web ca-certificates"),
    ] {
        let machine = machine.with_apt();
        let said = machine.refuses();
        assert!(said.starts_with(&format!("error: there is {missing}; ")), "{said}");
        assert!(said.ends_with(&format!("type: sudo apt-get install {packages}\n")), "{said}");
        assert!(!machine.0.path().join("installed").exists());
    }
}
