//! NVMe/RDMA over iWARP: target and initiator with each other, through every command.

use crate::copy_source::CopySource;
use crate::daemon::Daemon;
use crate::program::succeeds;
use serde_json::{Value, json};

#[test]
fn every_nvme_tcp_listener_is_also_announced_for_nvme_rdma() {
    let daemon = Daemon::serve(&["a=mem:8m", "--nvme-tcp", "127.0.0.1:0", "--nvme-rdma", "127.0.0.1:0"]);
    let (tcp, rdma) = (daemon.urls_of("nvme+tcp"), daemon.urls_of("nvme+rdma"));
    assert_eq!((tcp.len(), rdma.len()), (1, 2));
    let same = tcp[0].replace("nvme+tcp://", "nvme+rdma://") + "?rdma=iwarp";
    assert_eq!(rdma[0], same);
    // The other listener serves both as well, and both have the same subsystem.
    let other = rdma[1].replace("nvme+rdma://", "nvme+tcp://").replace("?rdma=iwarp", "");
    let told = |url: &str| -> Value { serde_json::from_str(&succeeds(&["info", "--json", url])).unwrap() };
    let first = told(&tcp[0]);
    assert_eq!((&first["protocol"], &told(&rdma[0])["protocol"]), (&json!("nvme-tcp"), &json!("nvme-rdma")));
    for url in [&rdma[0], &rdma[1], &other] {
        assert_eq!((&told(url)["serial"], &told(url)["size"]), (&first["serial"], &json!(8 << 20)));
    }
    // Discovery lists subsystems of its own transport.
    for (url, scheme) in [(&rdma[0], "nvme+rdma://"), (&tcp[0], "nvme+tcp://")] {
        let found = succeeds(&["discover", "--json", url.split("/nqn").next().unwrap()]);
        let found: Value = serde_json::from_str(&found).unwrap();
        let exports = found["exports"].as_array().unwrap();
        assert!(!exports.is_empty(), "{found}");
        assert!(exports.iter().all(|export| export["url"].as_str().unwrap().starts_with(scheme)), "{found}");
        assert_eq!(exports[0]["size"], json!(8 << 20));
    }
}

#[test]
fn data_copied_over_tcp_and_rdma_and_back_is_unchanged_with_and_without_crcs() {
    let source = CopySource::new(16, 1);
    let daemon = Daemon::serve(&["mem:16m", "--nvme-tcp", "127.0.0.1:0"]);
    let (tcp, rdma) = (&daemon.urls_of("nvme+tcp")[0], &daemon.urls_of("nvme+rdma")[0]);
    let with_crc = format!("{rdma}&crc=on&connections=3&queue_size=8");
    for (there, back) in [(rdma, tcp), (&with_crc, rdma), (tcp, &with_crc)] {
        source.survives_there_and_back(there, back, &[]);
    }
}

#[test]
fn a_remote_volume_over_nvme_rdma_is_exported_again() {
    let first = Daemon::serve(&["a=mem:8m", "--nvme-rdma", "127.0.0.1:0"]);
    let url = &first.urls_of("nvme+rdma")[0];
    let second = Daemon::serve(&[&format!("b={url}"), "--nvme-rdma", "127.0.0.1:0"]);
    let told = succeeds(&["info", "--json", &second.urls_of("nvme+rdma")[0]]);
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!((&told["size"], &told["protocol"]), (&json!(8 << 20), &json!("nvme-rdma")));
    // Only NVMe/TCP has digests.
    assert_eq!((told.get("header_digest"), told.get("data_digest")), (None, None));
    assert!(!succeeds(&["info", url]).contains("digest"));
    let tcp = url.replace("nvme+rdma://", "nvme+tcp://").replace("?rdma=iwarp", "");
    assert!(succeeds(&["info", &tcp]).contains("header digest none"));
}
