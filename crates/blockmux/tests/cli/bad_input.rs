//! Invalid input: one line that names the thing and says what to do, and exit status 2.

use crate::daemon::Daemon;
use crate::program::{blockmux, text};

#[test]
fn help_fits_a_terminal_of_80_columns() {
    let all = text(&blockmux(["--help"]).stdout);
    let commands =
        all.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names =
        commands.filter(|line| !line.starts_with("   ")).map(|line| line.split_whitespace().next().unwrap());
    let names: Vec<&str> = names.filter(|name| *name != "help").collect();
    assert!(names.len() > 6, "{all}");
    for command in [vec!["--help"]].into_iter().chain(names.iter().map(|name| vec![*name, "--help"])) {
        let output = blockmux(&command);
        assert_eq!(output.status.code(), Some(0));
        let help = text(&output.stdout);
        assert!(help.contains("Examples:\n"), "{command:?}");
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{command:?}: {line}");
        }
    }
}

#[test]
fn the_version_is_that_of_the_package() {
    let output = blockmux(["--version"]);
    assert_eq!(text(&output.stdout), concat!("blockmux ", env!("CARGO_PKG_VERSION"), "\n"));
}

/// Invalid arguments, and the message about them.
const WRONG: &[(&[&str], &str)] = &[
    (&[], "no command given; `blockmux --help` lists them"),
    (&["ctl"], "no command given; `blockmux ctl --help` lists them"),
    (&["serv"], "unrecognized subcommand 'serv'; a similar subcommand exists: 'serve'"),
    (&["serve"], "no volume to serve; give one, such as mem:1g or file:disk.img"),
    (
        &["serve", "mem:1m", "--listen", "127.0.0.1:0"],
        "unexpected argument '--listen' found; name the protocol, as in --nbd ADDR or --iscsi ADDR",
    ),
    (
        &["bench", "nbd://127.0.0.1/a", "--port", "10809"],
        "unexpected argument '--port' found; host and port are part of the URL, as in nbd://host:10809/export",
    ),
    (
        &["ctl", "unix:/s", "ana", "nqn.2026-11.com.example:a", "1", "standby"],
        "STATE standby: not one of optimized, non-optimized, inaccessible",
    ),
    (
        &["reset", "iscsi://192.0.2.1/iqn.a/0", "warm"],
        "FUNCTION warm: not one of lun, target, cold, abort-task-set, clear-task-set",
    ),
    (&["serve", "--frobnicate"], "unexpected argument '--frobnicate' found; --help lists the options"),
    (
        &["serve", "mem:1m", "--reed-only"],
        "unexpected argument '--reed-only' found; a similar argument exists: '--read-only'",
    ),
    (
        &["serve", "disk.img"],
        "`disk.img` does not say what kind of volume it is: write \
         file:disk.img for a file, block:disk.img for a device",
    ),
    (
        &["serve", "mem:x"],
        "in `mem:x`: `x` is not a size: write bytes, or a number with \
         k, m, g, t, p or e (powers of 1024), as in 64k or 1g",
    ),
    (
        &["serve", "a b=mem:1m"],
        "`a b` is not a valid name; use 1 to 200 letters, digits, `-`, \
         `_` and `.`",
    ),
    (
        &["serve", "mem:1m", "--state", "/dev/null"],
        "--state: /dev/null: not a directory; check its owner and permissions",
    ),
    (
        &["serve", "--config", "/dev/zero"],
        "cannot read config file /dev/zero: is not a regular file; give a regular file; check its path",
    ),
    (
        &["serve", "mem:1m", "--max-connections", "99999999999999"],
        "99999999999999 connections are too many; set at most 1048576",
    ),
    (
        &["report", "/dev/zero"],
        "/dev/zero: cannot read it: is longer than 64 MiB; give a bench.json, or the output of fio --output-format=json",
    ),
    (&["serve", "a=mem:1m", "a=mem:1m"], "two volumes are named `a`; rename one, as in NAME=mem:1g"),
    (
        &["serve", "mem:1m", "--nbd", "10809"],
        "--nbd 10809: `10809` is not a host; write :10809 for a port on loopback",
    ),
    (
        &["serve", "mem:1m", "--nbd", "/run/nbd.sock"],
        "--nbd /run/nbd.sock: `/run/nbd.sock` is a path; write unix:/run/nbd.sock for a Unix socket",
    ),
    (&["serve", "mem:1m", "--cores", "0"], "--cores 0: write a number of at least 1"),
    (&["serve", "mem:1m", "--cores", "1000"], "1000 cores are too many; set at most 256"),
    (&["serve", "mem:1m", "--poll", "often"], "--poll often: not one of adaptive, always, never"),
    (
        &["serve", "file:/nowhere/disk.img,size=10m,direct=off", "--nbd", ":0"],
        "file:/nowhere/disk.img,size=10m,direct=off: does not exist; options follow a question mark, as in \
         'file:/nowhere/disk.img?size=10m&direct=off'",
    ),
    (
        &["serve", "mem:1m", "--nbd", "*:10809"],
        "--nbd '*:10809': `*` is not an address; write 0.0.0.0:10809 for all IPv4 addresses of this machine, [::]:10809 \
         for all IPv6 ones",
    ),
    (
        &["serve", "mem:1m", "--nbd", "?volumes=disk0"],
        "--nbd '?volumes=disk0': an address is missing; write host:port, :port or unix:PATH before the question mark",
    ),
    (
        &["serve", "mem:1m", "--iscsi", ":?rdma=roce"],
        "--iscsi ':?rdma=roce': no port follows the colon; write one, or leave out the colon for the default port",
    ),
    (
        &["serve", "mem:1m", "--nbd", ":0?volume=disk0"],
        "--nbd ':0?volume=disk0': `:0?volume=disk0`: `volume=disk0` is not a parameter of a listener; write \
         volumes=NAME,NAME, allow=NETWORK,NETWORK, rdma=roce, rdma=verbs or advertise=HOST:PORT",
    ),
    (
        &["serve", "file:/nowhere/disk.img", "--nbd", ":0"],
        "file:/nowhere/disk.img: does not exist; check its path, or create it as 'file:/nowhere/disk.img?size=10g'",
    ),
    (
        &["serve", "mem:1m", "--config", "/nowhere/b.toml"],
        "cannot read config file /nowhere/b.toml: No such file or directory (os error 2); check its path",
    ),
    (
        &["serve", "mem:1m", "--nbd", "unix:/nowhere/socket"],
        "cannot listen on unix:/nowhere/socket: the directory does not exist; create it, or name another path",
    ),
    (
        &["serve", "mem:1m", "--nbd", "192.0.2.1:0"],
        "cannot listen on 192.0.2.1:0: this machine has no such address; `ip address` lists them",
    ),
    (
        &["serve", "stripe:1m:mem:1k", "--nbd", ":0"],
        "stripe:mem:1k: member 0 has 1024 bytes, less than one chunk of 1048576: take a smaller chunk",
    ),
    (
        &["serve", "log:/nowhere/log:mem:1m", "--nbd", ":0"],
        "log:/nowhere/log: cannot append to it: No such file or directory (os error 2); give another file",
    ),
    (
        &["serve", "null:8e", "--nbd", ":0"],
        "null:8e: has 9223372036854775808 bytes, but clients support at most 2^63 - 1; serve a smaller volume",
    ),
    (&["serve", "mem:1", "--nbd", ":0"], "mem:1: is smaller than one block; use at least 512"),
    (
        &["serve", "file:/nowhere/disk.img?size=1m", "--nbd", ":0"],
        "file:/nowhere/disk.img: its directory does not exist; create that first, or name another path",
    ),
    (&["bench", "mem:1m", "--runs", "x"], "--runs x: is not a whole number"),
    (
        &["bench", "mem:1m", "--congestion", "no such"],
        "--congestion 'no such': name a TCP congestion control, such as cubic, reno or bbr",
    ),
    (
        &["info", "localhost:10809"],
        "`localhost` in `localhost:10809` is not a kind of volume: use mem, null, file, block, vhost-user, rbd, slice, stripe, delay, fault, \
         rate, log, or a URL such as nbd://host/export",
    ),
    (&["info"], "the following required arguments were not provided: <URL>; --help lists the options"),
    (
        &["info", "iscsi://host/iqn.a%00/0"],
        "iscsi://host/iqn.a%00/0: name \"iqn.a%00\": an iSCSI name has no NUL byte",
    ),
    (
        &["info", "iscsi://user%secret@host/iqn.a/x"],
        "iscsi://user%...@host/iqn.a/x: logical unit \"x\": write a number from 0 to 16383 after the target's name",
    ),
    (
        &["info", "iscsi://host"],
        "iscsi://host: names no target; use iscsi://host/target-name/lun, as listed by `blockmux discover \
         iscsi://host`",
    ),
    (
        &["info", "iser://host"],
        "iser://host?rdma=iwarp: names no target; use iser://host/target-name/lun?rdma=iwarp, as listed by `blockmux \
         discover iser://host?rdma=iwarp`",
    ),
    (
        &["info", "iscsi://user@host/iqn.a/0?secret_file=/nowhere/secret"],
        "secret file /nowhere/secret: No such file or directory (os error 2); check its path",
    ),
    (
        &["info", "srp://host"],
        "srp://host?rdma=iwarp: names no target port, and SRP over RDMA/CM has no discovery; write \
         srp://host/TARGET-PORT-ID/lun?rdma=iwarp, as the target prints it",
    ),
    (
        &["info", "ftp://host"],
        "ftp://host: no protocol has the URL scheme `ftp`; use nbd://host/export or nbds://host/export or nbd+unix:///export?socket=PATH or \
         iscsi://host/target-name/lun or iser://host/target-name/lun or nvme+tcp://host/subsystem-nqn/nsid or nvme+rdma://host/subsystem-nqn/nsid or \
         srp://host/TARGET-PORT-ID/lun or aoe://IFACE/eSHELF.SLOT",
    ),
    (
        &["info", "nbds://host/a?tls-type=psk"],
        "nbds://host/a?tls-type=psk: parameter \"tls-psk-file\": missing; tls-type=psk needs tls-psk-file=FILE",
    ),
    (
        &["info", "nbd://host/a?b=1"],
        "nbd://host/a?b=1: parameter \"b\": unknown; known are socket, tls-certificates, tls-psk-file, tls-username, \
         tls-hostname, tls-type, tls-verify-peer, ktls, connections, reconnect and timeout",
    ),
    (
        &["discover", "nbd+unix:///?socket=/nowhere/socket"],
        "nbd+unix:///?socket=/nowhere/socket: unix:/nowhere/socket: connection failed: No such file or directory (os \
         error 2); check that an NBD server listens there",
    ),
    (
        &["discover", "mem:1g"],
        "mem:1g: is not a URL; use nbd://host/export or nbds://host/export or nbd+unix:///export?socket=PATH or \
         iscsi://host/target-name/lun or iser://host/target-name/lun or nvme+tcp://host/subsystem-nqn/nsid or nvme+rdma://host/subsystem-nqn/nsid or \
         srp://host/TARGET-PORT-ID/lun or aoe://IFACE/eSHELF.SLOT",
    ),
    (
        &["copy", "file:/nowhere/a", "file:/nowhere/a"],
        "file:/nowhere/a: source and destination are the same; give another destination",
    ),
    (&["copy", "mem:513", "null:1m"], "mem:513: is not a multiple of the block size, 512 bytes; use 1024"),
    (
        &["copy", "mem:1m?block_size=4096", "mem:1m", "--bs", "512"],
        "--bs 512: set a multiple of 4096 up to 32 MiB",
    ),
    (&["copy", "file:/nowhere/disk.img", "mem:1m"], "file:/nowhere/disk.img: does not exist; check its path"),
    (
        &["copy", "mem:2m", "mem:1m"],
        "mem:1m: has 1048576 bytes, but mem:2m has 2097152; use a destination that is at least as large",
    ),
    (&["copy", "mem:1m", "null:1m", "--bs", "1000"], "--bs 1000: set a multiple of 512 up to 32 MiB"),
    (&["copy", "mem:1m", "null:1m", "--iodepth", "0"], "--iodepth 0: write a number from 1 to 256"),
];

#[test]
fn an_invalid_command_line_is_reported_in_one_line_with_status_2() {
    for (args, expected) in WRONG {
        let output = blockmux(*args);
        assert_eq!(text(&output.stderr), format!("blockmux: {expected}\n"), "{args:?}");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}");
    }
}

#[test]
fn with_json_an_error_is_one_object() {
    for (args, code, message, hint) in [
        (
            &["info", "--json", "file:/nowhere/disk.img"][..],
            "invalid",
            "file:/nowhere/disk.img: does not exist",
            Some("check its path"),
        ),
        (
            &["ctl", "--json", "unix:/nowhere/control", "status"],
            "invalid",
            "/nowhere/control: cannot reach the daemon: No such file or directory (os error 2)",
            None,
        ),
        (
            &["serve", "mem:1m", "--json", "--run", "true"],
            "invalid",
            "the argument '--json' cannot be used with '--run <CMD>'",
            Some("--help lists the options"),
        ),
    ] {
        let output = blockmux(args);
        let said = text(&output.stderr);
        let error = &serde_json::from_str::<serde_json::Value>(&said).unwrap()["error"];
        assert_eq!(
            (error["code"].as_str(), error["message"].as_str()),
            (Some(code), Some(message)),
            "{said}"
        );
        assert!(hint.is_none() || error["hint"].as_str() == hint, "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(output.stdout.is_empty() && !output.status.success(), "{args:?}");
    }
}

#[test]
fn more_ram_than_the_machine_allows_is_refused() {
    let output = blockmux(["serve", "mem:4e", "--nbd", ":0"]);
    let said = text(&output.stderr);
    let (before, most) = said.split_once(" of memory; use at most ").unwrap();
    let memory = before.strip_prefix("blockmux: mem:4e: is too large for this machine's ").unwrap();
    assert!(memory.ends_with("iB") && most.ends_with("iB\n"), "{said}");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn a_missing_export_is_named_with_the_command_that_lists_exports() {
    let daemon = Daemon::serve(&["mem:1m"]);
    let socket = daemon.socket().display().to_string();
    let output = blockmux(["info", &format!("nbd+unix:///other?socket={socket}")]);
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1);
    assert!(said.contains("server has no export \"other\""), "{said}");
    assert!(
        said.ends_with(&format!("`blockmux discover 'nbd+unix:///?socket={socket}'` lists its exports\n")),
        "{said}"
    );
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn an_error_in_a_config_file_is_reported_with_file_and_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.toml");
    for (content, expected) in [
        (
            "nbd = [':0']\nfrobnicate = 1\n",
            ":2: unknown key `frobnicate`; remove it, docs/reference/config.md ",
        ),
        (
            "[[volume]]\nspec = 'mem:1m'\nsiez = 2\n",
            ":3: unknown key `siez`; remove it, docs/reference/config.md lists the keys",
        ),
        ("[[volume]]\nspec = 'disk.img'\n", ":2: `disk.img` does not say what kind of volume it is: "),
        ("nbd = 5\n", ":1: nbd: invalid type: integer `5`, expected a list, such as nbd = "),
        ("[[volume]\n", ":1: "),
    ] {
        std::fs::write(&path, content).unwrap();
        let output = blockmux(["serve", "--config", path.to_str().unwrap()]);
        let said = text(&output.stderr);
        assert!(said.starts_with(&format!("blockmux: {}{expected}", path.display())), "{said}");
        assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)), "{said}");
    }
}

#[test]
fn settings_of_a_protocol_without_a_listener_are_checked() {
    let target =
        |name, volume| format!("[[iscsi_target]]\nTargetName = '{name}'\nluns = {{ 0 = '{volume}' }}\n");
    let volume = "[[volume]]\nname = 'a'\nspec = 'mem:1m'\n";
    for (targets, expected) in [
        (target("iqn.2026-11.com.example:x", "b"), "no volume has the name `b`"),
        (target("iqn.2026-11.com.example:x", "a").repeat(2), "is also given in"),
    ] {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("{volume}{targets}")).unwrap();
        let path = file.path().to_str().unwrap();
        let output = blockmux(["serve", "--config", path, "--nbd", "127.0.0.1:0"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(expected), "{}", text(&output.stderr));
    }
}

#[test]
fn an_ana_state_of_an_unknown_listener_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text = "nvme_tcp = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[nvme_subsystem]]\n\
                nqn = 'nqn.2026-11.com.example:x'\nnamespaces = { 1 = 'a' }\n[[nvme_subsystem.ana_group]]\n\
                ANAGRPID = 1\nnamespaces = [1]\nstates = { '127.0.0.1:1' = 'inaccessible' }\n";
    std::fs::write(file.path(), text).unwrap();
    let output = blockmux(["serve", "--config", file.path().to_str().unwrap()]);
    let said = text_of(&output);
    assert!(said.contains("ana_group 1: 127.0.0.1:1 is not a listener; use one of 127.0.0.1:"), "{said}");
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)));
    let text = text.replace("{ 1 = 'a' }", "{ 1 = 'a' }\nlisteners = ['127.0.0.1:2']");
    std::fs::write(file.path(), text).unwrap();
    let output = blockmux(["serve", "--config", file.path().to_str().unwrap()]);
    let said = text_of(&output);
    assert!(said.contains("listeners: 127.0.0.1:2 is not a listener; use one of 127.0.0.1:"), "{said}");
    assert_eq!((said.lines().count(), output.status.code()), (1, Some(2)));
}

#[test]
fn an_access_state_of_an_unknown_listener_is_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let with = |listener: &str| {
        let text = format!(
            "iscsi = ['127.0.0.1:0']\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n[[iscsi_target]]\n\
             TargetName = 'iqn.2026-11.com.example:x'\nluns = {{ 0 = 'a' }}\n\
             access_states = {{ '{listener}' = 'standby' }}\n"
        );
        std::fs::write(file.path(), text).unwrap();
        let output = blockmux(["serve", "--config", file.path().to_str().unwrap(), "--run", "true"]);
        (text_of(&output), output.status.code())
    };
    let (said, status) = with("127.0.0.2");
    assert!(
        said.contains("access_states: 127.0.0.2:3260 is not a listener; use one of 127.0.0.1:"),
        "{said}"
    );
    assert_eq!((said.lines().count(), status), (1, Some(2)));
    assert_eq!(with("127.0.0.1:0").1, Some(0));
}

#[test]
fn a_destination_gets_no_advice_to_open_it_read_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    std::fs::write(&path, [0; 1 << 20]).unwrap();
    let file = format!("file:{}", path.display());
    let _daemon = Daemon::serve(&[&file]);
    let output = blockmux(["copy", "mem:1m", &file]);
    let said = text_of(&output);
    assert!(said.contains("is locked by process ") && said.ends_with("; stop that program\n"), "{said}");
}

#[test]
fn two_ram_volumes_of_one_size_are_different_volumes() {
    let output = blockmux(["copy", "mem:1m", "mem:1m"]);
    assert_eq!((text_of(&output).as_str(), output.status.code()), ("", Some(0)));
}

fn text_of(output: &std::process::Output) -> String {
    text(&output.stderr)
}

#[test]
fn a_ram_volume_beyond_the_address_space_limit_is_refused_naming_the_limit() {
    let mut command = std::process::Command::new("sh");
    // In KiB.
    command.args(["-c", "ulimit -v 500000; exec \"$0\" serve mem:1g", crate::program::BLOCKMUX]);
    let output = command.output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("mem:1g: the limit of address space (RLIMIT_AS, `ulimit -v`) leaves "), "{said}");
    assert!(!said.contains("this machine"), "{said}");
}
