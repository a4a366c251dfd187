//! Bans of unsafe code and of certain calls, except in listed places with a reason.

use super::source::{code, is_word, test_lines};
use super::{Finding, Tree, modules};

/// Words that must not appear except in listed places.
struct BannedWords {
    /// Text as in code; a word at either end is matched as a whole word.
    words: &'static str,
    /// Path prefixes that the ban applies to; if empty, it applies to all paths.
    only: &'static [&'static str],
    /// Path prefixes that are exempt, each with its reason.
    may: &'static [(&'static str, &'static str)],
    /// Whether tests are exempt.
    tests_may: bool,
    instead: &'static str,
}

const BANS: &[BannedWords] = &[
    BannedWords {
        words: "unsafe",
        only: &[],
        may: &[
            ("crates/volume/src/buf/mod.rs", "shared I/O memory is handled by address"),
            ("crates/volume/src/buf/caches.rs", "prefetches and streaming stores by address"),
            ("crates/volume/src/buf/words.rs", "words of memory that another process changes"),
            ("crates/engine/src/core/ring", "the kernel owns submitted memory until its completion"),
            ("crates/engine/src/sys/mod.rs", "system calls that no crate wraps"),
            ("crates/engine/src/sys/memory", "mapped and huge pages"),
            ("crates/tls/src/pipe.rs", "the callbacks of a library in C"),
            ("crates/engine/src/net/frames/kernel", "packet sockets, which take addresses of I/O memory"),
            ("crates/engine/src/net/frames/ring", "frames in memory that is shared with the kernel"),
            ("crates/engine/src/attach/ublk/kernel", "commands, descriptors and copies of the ublk driver"),
            ("crates/engine/src/sys/shared_event", "entries without memory, in a ring of their own"),
            ("crates/engine/src/sys/shared_memory", "memory that is shared with another process"),
            (
                "crates/engine/src/sys/lost_memory",
                "the handler of SIGBUS, for such memory that is taken away",
            ),
            ("crates/engine/src/volume/file/kernel", "submission entries and the system calls of files"),
            ("crates/verbs/src/abi", "types of functions of a library in C"),
            ("crates/verbs/src/library", "types of functions of a library in C"),
            ("crates/verbs/src/device", "calls a library in C"),
            ("crates/verbs/src/connection", "calls a library in C"),
            ("crates/verbs/src/async_event", "calls a library in C"),
            ("crates/verbs/src/completion_queue", "calls a library in C"),
            ("crates/verbs/src/memory", "calls a library in C"),
            ("crates/verbs/src/queue_pair", "calls a library in C"),
            ("crates/dynlib/src/lib.rs", "loads libraries in C"),
            ("crates/rbd/src/library", "types of functions of a library in C"),
            ("crates/rbd/src/cluster", "calls a library in C"),
            ("crates/rbd/src/client", "calls a library in C"),
            ("crates/rbd/src/pool", "calls a library in C"),
            ("crates/rbd/src/watch", "calls a library in C, which calls back"),
            ("crates/rbd/src/image", "calls a library in C"),
            ("crates/rbd/src/fake", "stands in for a library in C"),
            ("crates/rbd/src/lock", "calls a library in C"),
            ("crates/rbd/src/object", "calls a library in C"),
            ("crates/rbd/src/requests", "calls a library in C, which uses memory until it calls back"),
            ("crates/volume/tests/counting/", "an allocator that counts"),
        ],
        tests_may: false,
        instead: "use a module that may have unsafe code, or list this file with a reason in xtask/src/tidy/calls.rs",
    },
    BannedWords {
        words: ".unwrap()",
        only: &[],
        may: &[],
        tests_may: true,
        instead: "return an error, or give the reason why it cannot happen with expect()",
    },
    BannedWords {
        words: "thread::sleep",
        only: &[],
        may: &[],
        tests_may: false,
        instead: "wait for the event itself, with a deadline",
    },
    BannedWords {
        words: "println!",
        only: &[],
        may: TERMINAL,
        tests_may: true,
        instead: "return it, or use tracing; only the programs write to a terminal",
    },
    BannedWords {
        words: "eprintln!",
        only: &[],
        may: TERMINAL,
        tests_may: true,
        instead: "return it, or use tracing; only the programs write to a terminal",
    },
    BannedWords {
        words: "process::exit",
        only: &[],
        may: &[
            ("crates/blockmux/src/main.rs", "the exit status is part of the command line"),
            ("crates/blockmux/src/attach/own_io.rs", "its I/O may hang, and ends only with the process"),
        ],
        tests_may: false,
        instead: "return an error to main, so that everything is dropped",
    },
    BannedWords {
        words: "todo!",
        only: &[],
        may: &[],
        tests_may: false,
        instead: "write it, or leave it out",
    },
    BannedWords {
        words: "unimplemented!",
        only: &[],
        may: &[],
        tests_may: false,
        instead: "write it, or leave it out",
    },
    BannedWords { words: "dbg!", only: &[], may: &[], tests_may: false, instead: "remove it" },
    BannedWords {
        words: "Instant::now",
        only: SANS_IO,
        may: &[],
        tests_may: true,
        instead: "take the time as an argument",
    },
    BannedWords {
        words: "SystemTime",
        only: SANS_IO,
        may: &[],
        tests_may: true,
        instead: "take the time as an argument",
    },
    BannedWords {
        words: "std::net",
        only: NO_OS,
        may: &[],
        tests_may: true,
        instead: "sockets belong to the engine",
    },
    BannedWords {
        words: "std::fs",
        only: NO_OS,
        may: &[],
        tests_may: true,
        instead: "files belong to the engine",
    },
    BannedWords {
        words: "thread::spawn",
        only: NO_OS,
        may: &[],
        tests_may: true,
        instead: "threads belong to the engine",
    },
];

/// Programs that write to a terminal.
const TERMINAL: &[(&str, &str)] = &[
    ("crates/blockmux/src/", "the program's own output"),
    ("fuzz/targets/src/main.rs", "a program for developers"),
    ("xtask/src/", "a program for developers"),
];

/// Sans-I/O state machines: time and input are passed to them.
const SANS_IO: &[&str] = &["crates/wire/src/", "crates/proto/src/", "crates/rdma/src/", "crates/group/src/"];

/// Crates that make no operating-system calls.
const NO_OS: &[&str] =
    &["crates/wire/src/", "crates/proto/src/", "crates/rdma/src/", "crates/volume/src/", "crates/group/src/"];

/// Applies every ban to every source.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let test_files = modules::test_files(tree);
    let mut findings = unlisted(tree);
    for (path, source) in tree.ending(".rs") {
        let only_tests = test_files.contains(path);
        let (code, tests) = (code(source), test_lines(source));
        for (at, line) in code.lines().enumerate() {
            let is_test = only_tests || tests.iter().any(|range| range.contains(&at));
            for ban in BANS.iter().filter(|ban| ban.holds(path, is_test) && has_words(line, ban.words)) {
                findings.push(Finding::new(path, at + 1, format!("`{}` here; {}", ban.words, ban.instead)));
            }
        }
    }
    findings
}

/// Reports files with unsafe code that the documentation does not list.
fn unlisted(tree: &Tree) -> Vec<Finding> {
    let Some(page) = tree.0.get(PAGE) else { return Vec::new() };
    let places = BANS.iter().filter(|ban| ban.words == "unsafe").flat_map(|ban| ban.may);
    let missing = places.filter(|(path, _)| !page.contains(&format!("`{path}")));
    missing
        .map(|(path, _)| Finding::new(PAGE, 1, format!("{path} may have unsafe code; add it to the table")))
        .collect()
}

const PAGE: &str = "docs/internals/architecture.md";

impl BannedWords {
    fn holds(&self, path: &str, is_test: bool) -> bool {
        (self.only.is_empty() || self.only.iter().any(|start| path.starts_with(start)))
            && !self.may.iter().any(|(start, _)| path.starts_with(start))
            && !(is_test && self.tests_may)
    }
}

/// Whether `line` contains `words` as whole words.
fn has_words(line: &str, words: &str) -> bool {
    let (first, last) = (words.starts_with(is_word), words.ends_with(is_word));
    line.match_indices(words).any(|(at, _)| {
        let before = line[..at].chars().next_back().is_some_and(is_word);
        let behind = line[at + words.len()..].chars().next().is_some_and(is_word);
        !(first && before || last && behind)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{places, tree};
    use super::*;

    #[test]
    fn banned_words_match_whole_words_only() {
        assert!(has_words("x = unsafe { y };", "unsafe"));
        assert!(!has_words("#![forbid(unsafe_code)]", "unsafe"));
        assert!(!has_words("eprintln!()", "println!"));
        assert!(has_words("a.unwrap()", ".unwrap()"));
        assert!(!has_words("a.unwrap_or(b)", ".unwrap()"));
    }

    #[test]
    fn banned_words_are_found_in_code_only() {
        let source = "\
fn f() {
    // a.unwrap() is banned
    let s = \"a.unwrap()\";
    a.unwrap();
}
#[cfg(test)]
mod tests {
    fn g() {
        a.unwrap();
        std::thread::sleep(b);
    }
}
";
        let findings = check(&tree(&[("crates/lab/src/job.rs", source)]));
        assert_eq!(places(&findings), [("crates/lab/src/job.rs", 4), ("crates/lab/src/job.rs", 10)]);
        assert_eq!(
            findings[0].to_string(),
            "crates/lab/src/job.rs:4: `.unwrap()` here; return an error, or give the reason why it cannot happen with expect()"
        );
    }

    #[test]
    fn unsafe_is_for_the_named_files() {
        let source = "fn f() { unsafe { g() } }";
        let files = [
            ("crates/engine/src/core/ring.rs", source),
            ("crates/engine/src/net/socket.rs", source),
            ("crates/volume/src/buf/mod.rs", source),
            ("crates/volume/src/mem.rs", source),
        ];
        let findings = check(&tree(&files));
        assert_eq!(
            places(&findings),
            [("crates/engine/src/net/socket.rs", 1), ("crates/volume/src/mem.rs", 1)]
        );
    }

    #[test]
    fn the_page_lists_every_place_of_unsafe_code() {
        let places: Vec<_> = BANS[0].may.iter().map(|(path, _)| format!("`{path}`")).collect();
        assert!(check(&tree(&[(PAGE, &places.concat())])).is_empty());
        let findings = check(&tree(&[(PAGE, &places[1..].concat())]));
        assert!(findings[0].to_string().contains("crates/volume/src/buf/mod.rs may have unsafe code"));
    }

    #[test]
    fn a_session_does_not_look_at_the_clock_but_its_tests_may() {
        let files = [
            ("crates/proto/src/lib.rs", "fn f() { Instant::now(); }"),
            ("crates/proto/tests/pair.rs", "fn f() { Instant::now(); }"),
            ("crates/engine/src/clock.rs", "fn f() { Instant::now(); }"),
        ];
        assert_eq!(places(&check(&tree(&files))), [("crates/proto/src/lib.rs", 1)]);
    }

    #[test]
    fn only_programs_print() {
        let files = [
            ("crates/blockmux/src/serve.rs", "fn f() { println!(); }"),
            ("crates/lab/src/table.rs", "fn f() { println!(); }\nfn g() { std::process::exit(1); }"),
            ("tests/interop/qemu.rs", "fn f() { println!(); }"),
        ];
        let findings = check(&tree(&files));
        assert_eq!(places(&findings), [("crates/lab/src/table.rs", 1), ("crates/lab/src/table.rs", 2)]);
    }
}
