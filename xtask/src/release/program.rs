//! The programs of a release: for each architecture a dynamic one and a static one.

use crate::process::{cargo, succeed, target_directory};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The C library of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Libc {
    /// glibc: dynamic, loads rdma-core.
    Gnu,
    /// musl: static, loads no libraries.
    Musl,
}

/// A program of a release.
#[derive(Debug)]
pub(super) struct Program {
    /// Rust's name of the target.
    pub(super) triple: &'static str,
    pub(super) libc: Libc,
    /// The architecture as container images name it.
    pub(super) architecture: &'static str,
    /// Programs and files that a build needs, each with its Debian package.
    pub(super) tools: &'static [(&'static str, &'static str)],
    /// Environment of a build, beside that of all.
    environment: &'static [(&'static str, &'static str)],
    /// What runs it on x86-64.
    runner: &'static [&'static str],
}

pub(super) const PROGRAMS: &[Program] = &[
    Program {
        triple: "x86_64-unknown-linux-gnu",
        libc: Libc::Gnu,
        architecture: "amd64",
        tools: &[("gcc", "gcc libc6-dev"), READELF],
        environment: &[],
        runner: &[],
    },
    Program {
        triple: "x86_64-unknown-linux-musl",
        libc: Libc::Musl,
        architecture: "amd64",
        tools: &[("musl-gcc", "musl-tools"), READELF],
        environment: &[],
        runner: &[],
    },
    Program {
        triple: "aarch64-unknown-linux-gnu",
        libc: Libc::Gnu,
        architecture: "arm64",
        tools: &[ARM64_GCC, ARM64_QEMU, READELF],
        environment: &[("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", ARM64_GCC.0)],
        runner: &[ARM64_QEMU.0, "-L", "/usr/aarch64-linux-gnu"],
    },
    Program {
        triple: "aarch64-unknown-linux-musl",
        libc: Libc::Musl,
        architecture: "arm64",
        tools: &[
            ARM64_GCC,
            ARM64_QEMU,
            READELF,
            (
                "/usr/lib/aarch64-linux-musl/musl-gcc.specs",
                "musl-dev:arm64, after dpkg --add-architecture arm64 and apt-get update",
            ),
        ],
        environment: &[
            ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER", ARM64_GCC.0),
            ("CC_aarch64_unknown_linux_musl", ARM64_GCC.0),
            // glibc's libgcc, which has the outlined atomics, needs more of glibc.
            (
                "CFLAGS_aarch64_unknown_linux_musl",
                "-specs=/usr/lib/aarch64-linux-musl/musl-gcc.specs -mno-outline-atomics",
            ),
        ],
        runner: &[ARM64_QEMU.0],
    },
];

const READELF: (&str, &str) = ("readelf", "binutils");
const ARM64_GCC: (&str, &str) = ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross");
const ARM64_QEMU: (&str, &str) = ("qemu-aarch64-static", "qemu-user-static");

impl Program {
    /// The name of its artifacts, without an extension.
    pub(super) fn artifact(&self) -> String {
        let machine = self.triple.split('-').next().unwrap_or(self.triple);
        let kind = match self.libc {
            Libc::Gnu => "",
            Libc::Musl => "-static",
        };
        format!("blockmux-{}-linux-{machine}{kind}", env!("CARGO_PKG_VERSION"))
    }

    /// Builds it; returns its path.
    pub(super) fn build(&self, root: &Path) -> Result<PathBuf> {
        let mut build = cargo(root, "build --profile dist --locked --package blockmux");
        build.args(["--target", self.triple]).envs(self.environment.iter().copied());
        // No path of the machine is in the program, so that it can be built again elsewhere.
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        // The last one that fits counts: a target directory may be in the source.
        let places =
            [(Some(root.to_owned()), "/source"), (home, "/cargo"), (Some(target_directory(root)), "/target")];
        let places: Vec<String> = places
            .iter()
            .filter_map(|(from, to)| Some(format!("{}={to}", from.as_ref()?.display())))
            .collect();
        let flags: Vec<String> = places.iter().map(|place| format!("--remap-path-prefix={place}")).collect();
        build.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
        let (variable, flags) = self.c_flags(&places);
        build.env(variable, flags);
        succeed(&mut build)?;
        Ok(target_directory(root).join(self.triple).join("dist/blockmux"))
    }

    /// The variable with the flags of the C compiler, and these with the places that it renames.
    fn c_flags(&self, places: &[String]) -> (String, String) {
        let variable = format!("CFLAGS_{}", self.triple.replace('-', "_"));
        let own =
            self.environment.iter().find(|(name, _)| *name == variable).map(|(_, flags)| (*flags).to_owned());
        let renamed = places.iter().map(|place| format!("-ffile-prefix-map={place}"));
        let flags = own.into_iter().chain(renamed).collect::<Vec<_>>().join(" ");
        (variable, flags)
    }

    /// Runs `built`, which may be for another architecture.
    pub(super) fn command(&self, built: &Path) -> Command {
        let mut words = self.runner.iter().map(Path::new).chain([built]);
        let mut command = Command::new(words.next().unwrap_or(built));
        command.args(words);
        command
    }

    /// Whether it runs, needs no more than is promised, and names what it cannot do.
    ///
    /// # Errors
    /// What does not hold.
    pub(super) fn check(&self, built: &Path) -> Result<()> {
        let version = succeed(self.command(built).arg("--version"))?;
        ensure!(version.starts_with(concat!("blockmux ", env!("CARGO_PKG_VERSION"))), "it says {version}");
        let dynamic = succeed(Command::new("readelf").args(["--dynamic", "--wide"]).arg(built))?;
        let libraries = needed(&dynamic);
        match self.libc {
            Libc::Gnu => {
                if let Some(other) = libraries.iter().find(|name| !is_of_glibc(name)) {
                    bail!("{} needs {other}, which is not in every Debian", built.display());
                }
                let symbols = succeed(Command::new("readelf").args(["--dyn-syms", "--wide"]).arg(built))?;
                let newest = newest_glibc(&symbols).context("it needs no version of glibc")?;
                ensure!(
                    newest <= NEWEST_GLIBC,
                    "{} needs glibc {}.{}, but Debian 12 has {}.{}; build it there",
                    built.display(),
                    newest.0,
                    newest.1,
                    NEWEST_GLIBC.0,
                    NEWEST_GLIBC.1,
                );
            }
            Libc::Musl => {
                ensure!(libraries.is_empty(), "{} needs {}", built.display(), libraries.join(", "));
                ensure!(version.contains("static build"), "it does not say that it is static: {version}");
                let len = fs::metadata(built).with_context(|| built.display().to_string())?.len();
                ensure!(len < MAX_STATIC_LEN, "{} has {len} bytes, not under 30 MB", built.display());
            }
        }
        Ok(())
    }
}

/// The names of libraries in the output of `readelf --dynamic`.
fn needed(dynamic: &str) -> Vec<&str> {
    let lines = dynamic.lines().filter(|line| line.contains("(NEEDED)"));
    lines.filter_map(|line| Some(line.rsplit_once('[')?.1.trim_end().trim_end_matches(']'))).collect()
}

/// Whether a library is of glibc, or of the compiler, whose library every Debian has.
fn is_of_glibc(name: &str) -> bool {
    ["libc.so.6", "libm.so.6", "libgcc_s.so.1"].contains(&name) || name.starts_with("ld-linux-")
}

/// The newest version of glibc in the output of `readelf --dyn-syms`.
fn newest_glibc(symbols: &str) -> Option<(u32, u32)> {
    let versions = symbols.split("@GLIBC_").skip(1).filter_map(|rest| {
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    versions.max()
}

/// The version of glibc in Debian 12.
const NEWEST_GLIBC: (u32, u32) = (2, 36);

/// Maximum size of a static program in bytes. The goal is 15 MB, compressed or not: it has 26 MB.
const MAX_STATIC_LEN: u64 = 30_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifacts_are_named_after_machine_and_kind() {
        let names: Vec<String> = PROGRAMS.iter().map(Program::artifact).collect();
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(names[0], format!("blockmux-{version}-linux-x86_64"));
        assert_eq!(names[3], format!("blockmux-{version}-linux-aarch64-static"));
    }

    #[test]
    fn a_program_of_another_architecture_is_run_by_its_emulator() {
        let command = PROGRAMS[2].command(Path::new("/b"));
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
        assert_eq!(command.get_program(), "qemu-aarch64-static");
        assert_eq!(words, ["-L", "/usr/aarch64-linux-gnu", "/b"]);
        assert_eq!(PROGRAMS[0].command(Path::new("/b")).get_program(), "/b");
    }

    #[test]
    fn the_c_in_a_program_names_no_path_of_the_machine_either() {
        let places = ["/a=/source".to_owned(), "/b=/cargo".to_owned()];
        let renamed = "-ffile-prefix-map=/a=/source -ffile-prefix-map=/b=/cargo";
        let expected = ("CFLAGS_x86_64_unknown_linux_gnu".to_owned(), renamed.to_owned());
        assert_eq!(PROGRAMS[0].c_flags(&places), expected);
        let (variable, flags) = PROGRAMS[3].c_flags(&places);
        assert_eq!(variable, "CFLAGS_aarch64_unknown_linux_musl");
        assert!(flags.starts_with("-specs=") && flags.ends_with(renamed), "{flags}");
    }

    #[test]
    fn libraries_and_versions_of_glibc_are_read_from_readelf() {
        let dynamic = " 0x0000000000000001 (NEEDED)             Shared library: [libgcc_s.so.1]\n \
                       0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n \
                       0x000000000000000c (INIT)               0x5000\n";
        assert_eq!(needed(dynamic), ["libgcc_s.so.1", "libc.so.6"]);
        assert!(needed(dynamic).iter().all(|name| is_of_glibc(name)) && !is_of_glibc("librbd.so.1"));
        let symbols = "1: 0 0 FUNC GLOBAL DEFAULT UND strlen@GLIBC_2.2.5 (2)\n\
                       2: 0 0 FUNC GLOBAL DEFAULT UND pidfd_open@GLIBC_2.36 (3)\n\
                       3: 0 0 FUNC GLOBAL DEFAULT UND stat@GLIBC_2.33 (4)\n";
        assert_eq!(newest_glibc(symbols), Some((2, 36)));
        assert_eq!(newest_glibc("no symbols"), None);
    }
}
