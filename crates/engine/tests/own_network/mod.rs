//! Tests in private network namespaces, where any process has `CAP_NET_RAW` and `CAP_NET_ADMIN`.

use std::process::Command;

/// Whether the test with this name runs in a network of its own, which `setup` has prepared.
/// Otherwise the call has run the test again in one, which needs user namespaces or root. Without
/// both, or if the setup fails, it prints a line that begins with `skipped: `.
#[expect(clippy::print_stdout, reason = "the reason of a skipped test")]
pub(crate) fn is_in_own_network(test: &str, setup: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let alone = |then: &str| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net", "sh", "-c", &format!("{setup} && {then}"), "sh"]);
        command
    };
    match alone("true").output() {
        Ok(made) if made.status.success() => {}
        Ok(made) => {
            let why = String::from_utf8_lossy(&made.stderr);
            println!("skipped: cannot create a private network with '{setup}': {}", why.trim_end());
            return false;
        }
        Err(error) => {
            println!("skipped: cannot run unshare: {error}");
            return false;
        }
    }
    let own = std::env::current_exe().unwrap();
    let mut again = alone("exec \"$@\"");
    let status = again.arg(own).args(["--exact", test, "--nocapture"]).env(INSIDE, "1").status().unwrap();
    assert!(status.success(), "it failed in a network of its own");
    false
}

/// Set in the process that runs in the namespace.
const INSIDE: &str = "BLOCKMUX_OWN_NETWORK";
