//! Providers of queue pairs are named only where they are implemented or chosen, so that a further
//! provider is one module and an entry of each table.

use super::modules::test_files;
use super::source::test_lines;
use super::{Finding, Tree};

/// Reports each product line that names a provider, in code or in a string. Comments may.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let tests = test_files(tree);
    let is_product = |path: &str| {
        path.starts_with("crates/")
            && path.contains("/src/")
            && !tests.contains(path)
            && !MAY.iter().any(|(prefix, _)| path.starts_with(prefix))
    };
    let mut findings = Vec::new();
    for (path, source) in tree.ending(".rs").filter(|(path, _)| is_product(path)) {
        let tests = test_lines(source);
        let is_code = |at: usize, line: &str| {
            !line.trim_start().starts_with("//") && !tests.iter().any(|lines| lines.contains(&at))
        };
        for (at, line) in source.lines().enumerate().filter(|(at, line)| is_code(*at, line)) {
            let line = line.to_lowercase();
            if let Some(name) = PROVIDERS.iter().find(|name| line.contains(**name)) {
                let what = format!("names the provider `{name}`; be generic over the fabric (decision 91)");
                findings.push(Finding::new(path, at + 1, what));
            }
        }
    }
    findings
}

/// Names of providers, in lower case. RoCEv2 is known by its fabric and its provider only: its port
/// is a transport as TCP is, and listeners name it.
const PROVIDERS: &[&str] = &["iwarp", "rocefabric", "rocerecords", "verbsfabric", "devicequeuepair"];

/// Path prefixes of files that name providers, each with its reason.
const MAY: &[(&str, &str)] = &[
    ("crates/wire/src/", "bytes of the standards"),
    ("crates/rdma/src/", "the providers"),
    ("crates/engine/src/fabric/", "the fabric of each provider"),
    ("crates/verbs/src/", "the transports of devices"),
    ("crates/proto/src/names/rdma.rs", "the names in URLs"),
    ("crates/blockmux/src/protocol/fabric.rs", "the table that chooses a fabric by its name"),
    ("crates/blockmux/src/cli/bench/fabric.rs", "the fabrics that are measured"),
    ("crates/lab/src/suite.rs", "the name of a published study"),
];

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn a_provider_is_named_only_where_it_may_be() {
        let source = "// iWARP\nuse x::IwarpFabric;\nconst URL: &str = \"?rdma=iwarp\";\n\
            use x::RoceFabric;\nuse x::RoceRecords;\nuse x::RoceHost;\n\
            #[cfg(test)]\nmod tests {\n    use x::Iwarp;\n}\n";
        let files = [
            ("crates/blockmux/src/protocol/srp/mod.rs", source),
            ("crates/engine/src/fabric/iwarp.rs", source),
            ("crates/engine/tests/sim_srp.rs", source),
            ("xtask/src/peers/srp.rs", source),
        ];
        let first = "crates/blockmux/src/protocol/srp/mod.rs";
        assert_eq!(places(&check(&tree(&files))), [2, 3, 4, 5].map(|line| (first, line)));
    }
}
