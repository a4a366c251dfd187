//! Manifests: every package takes the workspace's lints, and dependencies point one way.

use super::{Finding, Tree};

/// Names of packages without `blockmux-`, and of the packages that each may depend on. Crates
/// exist to make wrong dependencies impossible.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("wire", &[]),
    ("volume", &[]),
    ("proto", &["wire", "volume"]),
    ("rdma", &["wire", "volume", "proto"]),
    ("tls", &[]),
    ("dynlib", &[]),
    ("verbs", &["dynlib", "volume"]),
    ("rbd", &["dynlib", "volume"]),
    ("group", &["volume"]),
    ("engine", &["volume", "proto", "rdma", "tls", "verbs", "rbd", "group"]),
    ("lab", &["volume", "proto", "engine"]),
    ("blockmux", &["wire", "volume", "proto", "group", "verbs", "engine", "lab"]),
    ("fuzz-targets", &["wire", "volume", "proto", "group", "rdma", "tls", "engine", "lab"]),
    ("fuzz", &["fuzz-targets"]),
    ("xtask", &[]),
];

/// Applies every rule to every package.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, manifest) in tree.ending("Cargo.toml").filter(|(_, manifest)| manifest.contains("[package]")) {
        // A package that is its own workspace has no lints to inherit.
        let is_member = !manifest.contains("[workspace]");
        if is_member && section(manifest, |name| name == "lints").all(|(_, line)| line != "workspace = true")
        {
            findings.push(Finding::new(
                path,
                1,
                "does not inherit lints; write `[lints]` and `workspace = true`",
            ));
        }
        findings.extend(wrong_dependencies(path, manifest));
    }
    findings
}

fn wrong_dependencies(path: &str, manifest: &str) -> Vec<Finding> {
    let name = section(manifest, |name| name == "package")
        .find_map(|(_, line)| line.strip_prefix("name = "))
        .map_or("", |name| short(name.trim_matches('"')));
    let Some((_, may)) = MAY_DEPEND_ON.iter().find(|(package, _)| *package == name) else {
        let what = format!("{name} is new; list its dependencies in xtask/src/tidy/manifests.rs");
        return vec![Finding::new(path, 1, what)];
    };
    let mut findings = Vec::new();
    let dependency_of = |line: &'_ str| line.split(['.', ' ', '=']).next().unwrap_or_default().to_owned();
    // Tests may use wire formats, because wire is below everything, and test-only features of their
    // package.
    let only_for_tests = section(manifest, |name| name == "dev-dependencies")
        .filter(|(_, line)| ["wire", name].contains(&short(&dependency_of(line))))
        .map(|(at, _)| at)
        .collect::<Vec<_>>();
    for (at, line) in section(manifest, |name| name.contains("dependencies")) {
        if only_for_tests.contains(&at) {
            continue;
        }
        let dependency = dependency_of(line);
        if dependency.starts_with("blockmux") && !may.contains(&short(&dependency)) {
            let what = format!(
                "{name} may not depend on {}; move the code to a crate that both may use",
                short(&dependency)
            );
            findings.push(Finding::new(path, at, what));
        }
    }
    findings
}

fn short(package: &str) -> &str {
    package.strip_prefix("blockmux-").unwrap_or(package)
}

/// The lines, numbered from 1, of the sections with matching names. A dependency with a section of
/// its own counts as a line with its name.
fn section(manifest: &str, is_so: impl Fn(&str) -> bool) -> impl Iterator<Item = (usize, &str)> {
    let mut inside = false;
    manifest.lines().enumerate().filter_map(move |(at, line)| {
        let line = line.trim();
        let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) else {
            return inside.then_some((at + 1, line));
        };
        inside = is_so(name);
        let own = name.rsplit_once("dependencies.").map(|(_, dependency)| (at + 1, dependency));
        own.filter(|_| inside)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    const LINTS: &str = "[lints]\nworkspace = true\n";

    #[test]
    fn dependencies_point_one_way() {
        let manifest = |name: &str, rest: &str| format!("[package]\nname = \"{name}\"\n\n{rest}\n{LINTS}");
        let cases = [
            ("blockmux-proto", "[dependencies]\nblockmux-wire.workspace = true", vec![]),
            ("blockmux-proto", "[dependencies]\nblockmux-engine.workspace = true", vec![5]),
            ("blockmux-wire", "[dev-dependencies]\nblockmux-volume = { workspace = true }", vec![5]),
            ("blockmux-volume", "[dependencies.blockmux-wire]\nworkspace = true", vec![4]),
            ("blockmux-volume", "[features]\nblockmux-wire = []", vec![]),
            ("blockmux-lab", "[dependencies]\nserde.workspace = true\nblockmux.workspace = true", vec![6]),
            ("blockmux-new", "", vec![1]),
        ];
        for (name, rest, lines) in cases {
            let manifest = manifest(name, rest);
            let findings = check(&tree(&[("a/Cargo.toml", &manifest)]));
            let found: Vec<usize> = places(&findings).into_iter().map(|(_, line)| line).collect();
            assert_eq!(found, lines, "{manifest}");
        }
    }

    #[test]
    fn a_package_takes_the_workspaces_lints() {
        let own = "[package]\nname = \"xtask\"\n[lints.rust]\nunsafe_code = \"allow\"\n";
        assert_eq!(places(&check(&tree(&[("xtask/Cargo.toml", own)]))), [("xtask/Cargo.toml", 1)]);
        let taken = format!("[package]\nname = \"xtask\"\n{LINTS}");
        assert!(check(&tree(&[("xtask/Cargo.toml", &taken)])).is_empty());
        assert!(check(&tree(&[("Cargo.toml", "[workspace]\nmembers = []\n")])).is_empty());
    }
}
