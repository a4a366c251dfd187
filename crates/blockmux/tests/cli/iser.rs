//! iSER over iWARP: target and initiator with each other, through every command.

use crate::copy_source::{CopySource, a_copy_survives_a_kill};
use crate::daemon::Daemon;
use crate::program::{blockmux, succeeds};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

#[test]
fn every_iscsi_listener_is_also_announced_for_iser() {
    let daemon = Daemon::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0", "--iser", "127.0.0.1:0"]);
    let (iscsi, iser) = (daemon.urls_of("iscsi"), daemon.urls_of("iser"));
    assert_eq!((iscsi.len(), iser.len()), (1, 2));
    let same = iscsi[0].replace("iscsi://", "iser://") + "?rdma=iwarp";
    assert_eq!(iser[0], same);
    let commands = daemon.json["exports"][0]["commands"].as_array().unwrap();
    let node = format!("-T iqn.2026-11.blockmux:a -p {} -I iser", iser[0].split('/').nth(2).unwrap());
    let command = format!("iscsiadm -m node {node} -o new && iscsiadm -m node {node} --login");
    assert!(commands.contains(&json!(command)), "{commands:?}");
    // The other listener serves both as well, and both have the same target.
    let other = iser[1].replace("iser://", "iscsi://").replace("?rdma=iwarp", "");
    let told = |url: &str| -> Value { serde_json::from_str(&succeeds(&["info", "--json", url])).unwrap() };
    let first = told(&iscsi[0]);
    assert_eq!((&first["protocol"], &told(&iser[0])["protocol"]), (&json!("iscsi"), &json!("iser")));
    for url in [&iser[0], &iser[1], &other] {
        assert_eq!((&told(url)["serial"], &told(url)["size"]), (&first["serial"], &json!(8 << 20)));
    }
    let found = succeeds(&["discover", "--json", iser[0].split("/iqn").next().unwrap()]);
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(
        (&found["exports"][0]["url"], &found["exports"][0]["size"]),
        (&json!(iser[0]), &json!(8 << 20))
    );
}

#[test]
fn data_copied_over_tcp_and_rdma_and_back_is_unchanged_with_and_without_crcs() {
    let source = CopySource::new(16, 1);
    let daemon = Daemon::serve(&["mem:16m", "--iscsi", "127.0.0.1:0"]);
    let (iscsi, iser) = (&daemon.urls_of("iscsi")[0], &daemon.urls_of("iser")[0]);
    let with_crc = format!("{iser}&crc=on");
    for (there, back) in [(iser, iscsi), (&with_crc, iser), (iscsi, &with_crc)] {
        source.survives_there_and_back(there, back, &[]);
    }
}

#[test]
fn chap_works_over_iser() {
    let directory = tempfile::tempdir().unwrap();
    let secret = |name: &str, content: &str| {
        let path = directory.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.display().to_string()
    };
    let (right, wrong) = (secret("right", "a secret of its own"), secret("wrong", "another secret"));
    let config = directory.path().join("config").display().to_string();
    let text = format!(
        "[[iscsi_target]]\nTargetName = 'iqn.2026-11.com.example:t'\nluns = {{ 5 = 'disk0' }}\n\
         [[iscsi_target.acl]]\nCHAP_N = 'me'\nsecret_file = '{right}'\n"
    );
    fs::write(&config, text).unwrap();
    let daemon = Daemon::serve_only(&["mem:1m", "--config", &config, "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iser").remove(0);
    let (user, file) = ("iser://me@", format!("&secret_file={right}"));
    assert!(url.starts_with(user) && url.contains("/iqn.2026-11.com.example:t/5?rdma=iwarp"), "{url}");
    let nobody = url.replace(user, "iser://").replace(&file, "");
    assert!(!nobody.contains(&right), "{nobody}");
    for url in [nobody, url.replace(&right, &wrong)] {
        assert_eq!(blockmux(["info", &url]).status.code(), Some(2), "{url}");
    }
    succeeds(&["info", &url]);
}

#[test]
fn a_copy_survives_a_kill_and_restart_of_the_target() {
    let serve = |volume: &str| {
        let daemon = Daemon::serve(&[volume, "--iscsi", "127.0.0.1:0"]);
        let url = daemon.urls_of("iser").remove(0);
        (daemon, url)
    };
    a_copy_survives_a_kill(serve, |address| ["--iscsi".to_owned(), address.to_owned()]);
}

#[test]
fn hostile_first_bytes_do_not_affect_other_connections() {
    let daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iser").remove(0);
    let place = url.trim_start_matches("iser://").split('/').next().unwrap();
    let request = b"MPA ID Req Frame\x10\x02\0\x04\x80\x20\x80\x20";
    let mut held = Vec::new();
    for extra in [&b""[..], b"\0\0\0\0", b"\xff\xff\xff\xff\xff\xff\xff\xff", &[0x43; 4096], &[0; 4096]] {
        let mut socket = std::net::TcpStream::connect(place).unwrap();
        // The target may close the connection before everything is sent.
        let _ = socket.write_all(&[request, extra].concat());
        held.push(socket);
    }
    succeeds(&["info", &url]);
    drop(held);
    succeeds(&["info", &url]);
    assert!(Path::new(&daemon.socket()).exists());
}

/// The connect request of Linux's NVMe/RDMA host, which prints the status of a rejection.
#[test]
fn a_host_of_nvme_rdma_is_rejected_when_it_connects() {
    let mut daemon = Daemon::serve(&["mem:1m", "--iscsi", "127.0.0.1:0"]);
    let url = daemon.urls_of("iser").remove(0);
    let place = url.trim_start_matches("iser://").split('/').next().unwrap();
    let mut socket = std::net::TcpStream::connect(place).unwrap();
    let queue = [&b"\0\0\0\0\x20\0\x1f\0"[..], &[0; 24]].concat();
    socket.write_all(&[b"MPA ID Req Frame\x10\x02\0\x24\0\x80\0\0", &queue[..]].concat()).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    // The reject flag, and NVMe/RDMA's status 6 behind the 4 bytes of RFC 6581.
    assert_eq!(answer, b"MPA ID Rep Frame\x30\x02\0\x08\0\0\0\x20\0\0\x06\0");
    daemon.wait_for_line("asked for NVMe/RDMA at a port that serves iSER");
    succeeds(&["info", &url]);
}
