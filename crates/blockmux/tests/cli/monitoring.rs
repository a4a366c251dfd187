//! Monitoring: metrics with Prometheus, and the live page in a browser.

use crate::api::{Tcp, exchange};
use crate::control::{Controlled, eventually};
use crate::program::{has, succeed, text};
use crate::raw_client::{READ, RawClient};
use crate::raw_iscsi::RawIscsi;
use crate::raw_nvme::RawNvme;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The value of a series; 0 if the series does not exist yet.
fn value(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}

/// The sum of all series of a metric whose text contains `part`.
fn sum(metrics: &str, metric: &str, part: &str) -> f64 {
    let own = metrics.lines().filter(|line| line.starts_with(&format!("{metric}{{")) && line.contains(part));
    own.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

#[test]
fn names_of_clients_leave_the_daemon_without_characters_that_must_not_be_printed() {
    let controlled = Controlled::serve(&["a=mem:1m", "--nvme-tcp", "127.0.0.1:0"]);
    let url = controlled.daemon.urls_of("nvme+tcp").remove(0);
    let name = "nqn.2026-11.i:\u{202e}\u{e0041}\u{1b}[2J\n\"\\";
    let _queues = RawNvme::controller(&url, name);
    let raw = |path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        exchange(UnixStream::connect(controlled.socket()).unwrap(), request.as_bytes()).1
    };
    let sessions = [raw("/v1/sessions"), controlled.said(&["sessions", "--json"])];
    for json in &sessions {
        let read: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!(read[0]["initiator"], name, "the value stays the same");
    }
    let (metrics, text) = (raw("/metrics"), controlled.said(&["sessions"]));
    let label = r#"initiator="nqn.2026-11.i:\\u{202e}\\u{e0041}\\u{1b}[2J\\n\"\\","#;
    assert!(metrics.contains(label), "{metrics}");
    assert!(text.contains(r#"nqn.2026-11.i:\u{202e}\u{e0041}\u{1b}[2J\n"\"#), "{text}");
    let is_printed = |c: char| c == '\n' || !c.is_control() && !['\u{202e}', '\u{e0041}'].contains(&c);
    for printed in sessions.iter().chain([&metrics, &text]) {
        assert!(printed.chars().all(is_printed), "{printed:?}");
    }
}

#[test]
fn metrics_count_requests_latencies_failures_and_sessions_by_volume_and_listener() {
    let volumes = ["a=mem:8m", "slow=delay:20ms:mem:8m", "bad=fault:op=write,error=medium:mem:8m"];
    let tcp = Tcp::serve(&[&volumes[..], &["--iscsi", "127.0.0.1:0"]].concat());
    let mut nbd = RawClient::connect(&tcp.daemon.socket());
    for _ in 0..20 {
        assert_eq!(nbd.write(0, 0, &[1; 4096]), 0);
        assert_eq!(nbd.read(0, 512), [1; 512]);
    }
    let urls = tcp.daemon.urls_of("iscsi");
    let url = |name: &str| urls.iter().find(|url| url.contains(&format!(":{name}/"))).unwrap();
    let read = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let mut slow = RawIscsi::login(url("slow"), "iqn.2026-11.i:a");
    let mut bad = RawIscsi::login(url("bad"), "iqn.2026-11.i:b");
    slow.run(&read, &[], 512);
    bad.run(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[1; 512], 0);
    let metrics = tcp.get("/metrics");
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    let socket = format!("unix:{}", tcp.daemon.socket().display());
    let labels = format!("volume=\"a\",protocol=\"nbd\",listener=\"{socket}\"");
    assert_eq!(value(&metrics, &format!("blockmux_volume_requests_total{{{labels},kind=\"write\"}}")), 20.0);
    assert_eq!(
        value(&metrics, &format!("blockmux_volume_data_bytes_total{{{labels},direction=\"read\"}}")),
        10240.0
    );
    let count = "blockmux_volume_latency_seconds_count";
    assert_eq!(value(&metrics, &format!("{count}{{volume=\"a\",kind=\"write\"}}")), 20.0);
    let buckets = metrics.lines().filter(|line| {
        line.starts_with("blockmux_volume_latency_seconds_bucket{") && line.contains("\"slow\",kind=\"read\"")
    });
    let buckets: Vec<(f64, f64)> = buckets
        .map(|line| {
            let (labels, value) = line.rsplit_once(' ').unwrap();
            let bound = labels.split("le=\"").nth(1).unwrap().trim_end_matches("\"}");
            (bound.parse().unwrap_or(f64::INFINITY), value.parse().unwrap())
        })
        .collect();
    assert_eq!(buckets.len(), 25, "{metrics}");
    let at_least = buckets.iter().filter(|(bound, _)| *bound < 0.02).map(|(_, count)| *count);
    assert!(at_least.fold(0.0, f64::max) < buckets[24].1, "some took 20 ms: {buckets:?}");
    assert_eq!(sum(&metrics, "blockmux_volume_failures_total", "volume=\"bad\",error=\"medium\""), 1.0);
    assert_eq!(sum(&metrics, "blockmux_sessions", "protocol=\"iscsi\""), 2.0);
    assert_eq!(
        sum(&metrics, "blockmux_session_requests_total", "initiator=\"iqn.2026-11.i:b\",target"),
        sum(&metrics, "blockmux_volume_requests_total", "volume=\"bad\"")
    );
    assert_eq!(sum(&metrics, "blockmux_listener_connections", "protocol=\"nbd\""), 1.0);
    assert!(sum(&metrics, "blockmux_core_sleeps_total", "core=\"0\"") > 0.0);
    assert!(value(&metrics, "process_resident_memory_bytes") > 1e6);
    // Requests in flight have started and not completed.
    assert_eq!(sum(&metrics, "blockmux_volume_queue_depth", ""), 0.0);
    // Counters include connections that have ended.
    drop((nbd, slow, bad));
    let gone = || sum(&tcp.get("/metrics"), "blockmux_volume_users", "") == 0.0;
    eventually("they are gone", gone);
    let metrics = tcp.get("/metrics");
    assert_eq!(value(&metrics, &format!("blockmux_volume_requests_total{{{labels},kind=\"write\"}}")), 20.0);
    assert_eq!(value(&metrics, &format!("{count}{{volume=\"a\",kind=\"write\"}}")), 20.0);
}

#[test]
fn the_queue_depth_is_the_number_of_requests_in_flight() {
    let tcp = Tcp::serve(&["fault:op=read,error=stuck:mem:8m"]);
    let mut nbd = RawClient::connect(&tcp.daemon.socket());
    for _ in 0..3 {
        nbd.request(READ, 0, 0, 512);
    }
    eventually("they are in flight", || {
        sum(&tcp.get("/metrics"), "blockmux_volume_queue_depth", "disk0") == 3.0
    });
    drop(nbd);
    let orphaned = || sum(&tcp.get("/metrics"), "blockmux_volume_orphaned_connections", "disk0");
    eventually("its client is gone", || orphaned() == 1.0);
}

/// A running Prometheus; killed when dropped.
struct Prometheus(Child);

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn prometheus_scrapes_a_daemon_and_loads_our_rules() {
    if !has("prometheus") || !has("promtool") || !has("curl") {
        return;
    }
    let contrib = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    let rules = contrib.join("blockmux.rules.yml").canonicalize().unwrap();
    succeed(Command::new("promtool").args(["check", "rules"]).arg(&rules));
    let tcp = Tcp::serve(&["a=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let mut nbd = RawClient::connect(&tcp.daemon.socket());
    assert_eq!(nbd.read(0, 512), [0; 512]);
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("prometheus.yml");
    let written = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: ['{}']\nscrape_configs:\n- job_name: blockmux\n  authorization: \
         {{credentials_file: '{}'}}\n  static_configs: [{{targets: ['{}']}}]\n",
        rules.display(),
        tcp.token_file.display(),
        tcp.url().trim_start_matches("http://")
    );
    fs::write(&config, written).unwrap();
    let at = format!("127.0.0.1:{}", free_port());
    let prometheus = Command::new("prometheus")
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
        .arg(format!("--web.listen-address={at}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _prometheus = Prometheus(prometheus.unwrap());
    let ask = |path: &str| {
        let output =
            Command::new("curl").args(["-sS", "--max-time", "10", &format!("http://{at}{path}")]).output();
        serde_json::from_slice::<Value>(&output.unwrap().stdout).unwrap_or_default()
    };
    let query = |query: &str| {
        let answer = ask(&format!("/api/v1/query?query={query}"));
        answer["data"]["result"][0]["value"][1].as_str().map(str::to_owned)
    };
    eventually("it has scraped", || query("up").as_deref() == Some("1"));
    assert_eq!(query("sum(blockmux_volume_requests_total%7Bkind=%22read%22%7D)").as_deref(), Some("1"));
    assert_eq!(query("blockmux_volume_size_bytes").as_deref(), Some("8388608"));
    let targets = ask("/api/v1/targets");
    assert_eq!(targets["data"]["activeTargets"][0]["lastError"], "", "{targets}");
    eventually("the rules are evaluated", || {
        let rules = ask("/api/v1/rules");
        let rules = rules["data"]["groups"][0]["rules"].as_array().cloned().unwrap_or_default();
        rules.len() == 11 && rules.iter().all(|rule| rule["health"] == "ok")
    });
    // Prometheus accepts each query of the dashboard.
    let dashboard = fs::read_to_string(contrib.join("grafana-dashboard.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let queries = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    for query in queries.map(|target| target["expr"].as_str().unwrap()) {
        let query =
            query.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$volume", ".*");
        let answer = succeed(
            Command::new("curl")
                .args(["-sS", "-G", &format!("http://{at}/api/v1/query"), "--data-urlencode"])
                .arg(format!("query={query}")),
        );
        assert!(answer.starts_with("{\"status\":\"success\""), "{query}: {answer}");
    }
}

#[test]
fn promtool_accepts_the_names_of_all_metrics() {
    if !has("promtool") {
        return;
    }
    let tcp = Tcp::serve(&["a=mem:8m"]);
    let mut nbd = RawClient::connect(&tcp.daemon.socket());
    assert_eq!(nbd.read(0, 512), [0; 512]);
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // promtool reads the older text format, which has no end marker and counters with their suffix.
    let metrics = tcp.get("/metrics").replace("# EOF\n", "");
    let counters: Vec<&str> =
        metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let older = metrics.lines().filter(|line| !line.starts_with("# UNIT")).map(|line| {
        let name = line.split(' ').nth(2).unwrap_or_default();
        let is_head = line.starts_with("# ") && counters.contains(&name);
        let line = if is_head { line.replacen(name, &format!("{name}_total"), 1) } else { line.to_owned() };
        let line = if line.starts_with("# ") && line.contains("blockmux_build") {
            line.replacen("blockmux_build", "blockmux_build_info", 1).replace(" info", " gauge")
        } else {
            line
        };
        line + "\n"
    });
    promtool.stdin.take().unwrap().write_all(older.collect::<String>().as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn the_page_shows_volumes_disks_and_sessions_in_a_browser_and_fits_a_phone() {
    let Some(browser) = browser() else { return };
    let tcp = Tcp::serve(&["a=mem:8m", "b=mem:8m", "--iscsi", "127.0.0.1:0"]);
    let mut scsi = RawIscsi::login(&tcp.daemon.urls_of("iscsi")[0], "iqn.2026-11.i:a");
    scsi.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512);
    let history = || serde_json::from_str::<Value>(&tcp.get("/v1/history")).unwrap();
    eventually("there is a point", || !history()["total"]["points"].as_array().unwrap().is_empty());
    let html = tcp.get_public("/");
    let paths = ["/v1/status", "/v1/sessions", "/v1/history", "/v1/actions"];
    let mut told: Value =
        paths.iter().map(|path| (*path, serde_json::from_str::<Value>(&tcp.get(path)).unwrap())).collect();
    let volume = &mut told["/v1/status"]["volumes"][0];
    volume["limits"] = json!({"iops": 500, "write_bandwidth": 10 << 20, "burst_ms": 2000});
    volume["client_limits"] = json!({"read_iops": 100});
    volume["throttled"] = json!({"pending": 3, "requests": 9, "seconds": 0.5});
    let now = &mut told["/v1/history"]["volumes"][0]["now"];
    (now["reads"], now["throttled"]) = (json!(400), json!(100));
    let counters =
        json!({"reads": 1, "writes": 2, "others": 0, "failed": 3, "read_bytes": 512, "written_bytes": 0});
    let disk = |more: Value| -> Value {
        let parts = [&counters, &json!({"read_only": false, "recovered": false}), &more];
        parts
            .iter()
            .flat_map(|part| part.as_object().unwrap().clone())
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    told["/v1/status"]["attachments"] = json!([
        disk(
            json!({"volume": "a", "state": "attached", "device": "/dev/ublkb0", "via": "ublk", "recovered": true})
        ),
        disk(json!({"volume": "b", "state": "failed", "error": "no <b>driver</b>"})),
    ]);
    // Names are chosen by peers, so they may contain markup.
    told["/v1/sessions"][0]["initiator"] = json!("iqn.2026-11.i:<b>a</b>");
    let change = |what, affected| json!({"change": what, "path": [], "affected": affected});
    let (now, later) = (change("volume <b>: added", json!(["one"])), change("cores: 2", json!([])));
    told["/v1/config/diff"] =
        json!({"applied": false, "changes": [now], "next_start": [later], "warnings": []});
    for (name, dark) in [("light", false), ("dark", true)] {
        let seen = seen(&browser, name, dark, &html, &told);
        assert_eq!(seen["errors"], json!([]), "{name}");
        assert_eq!((&seen["resources"], &seen["dark"]), (&json!([]), &json!(dark)));
        assert_eq!((&seen["volumes"], &seen["sessions"]), (&json!(["a", "b"]), &json!(["iscsi"])), "{name}");
        let notes = [
            "3 throttled now, 25% throttled",
            "limit 500 IOPS, write 10 MiB/s, burst 2 s",
            "each client read 100 IOPS",
        ];
        assert_eq!(seen["notes"], json!(notes), "{name}");
        let exported = json!(["nbd", "iscsi", "iser", "iqn.2026-11.blockmux:a"]);
        assert_eq!(seen["exported"], exported, "{name}");
        assert_eq!(seen["sorted"], json!([["a", "b", ""], ["b", "a", ""]]), "{name}");
        assert_eq!(seen["filtered"], json!(["b", "1 of 2 shown"]), "{name}");
        assert_eq!(seen["active"], json!(["a", "1 of 2 shown"]), "{name}");
        assert_eq!(seen["all"], json!(["b", "a", ""]), "{name}");
        let disks = json!([
            "a",
            "/dev/ublkb0",
            "ublk",
            "recovered",
            "b",
            "\u{2013}",
            "\u{2013}",
            "failed",
            "no <b>driver</b>"
        ]);
        assert_eq!(seen["disks"], disks, "{name}");
        assert_eq!(seen["initiator"], "iqn.2026-11.i:<b>a</b>");
        let drift = json!(["volume <b>: added (affects 1 session)", "cores: 2 (at the next start)"]);
        assert_eq!((&seen["drift"], &seen["config"]), (&drift, &json!("config file differs")), "{name}");
        assert_eq!((&seen["charts"], &seen["lines"]), (&json!(3), &json!(true)), "{name}");
        assert_eq!(seen["wider_than_wide"], json!([]), "{name}");
        assert_eq!(seen["wider_than_narrow"], json!([]), "{name}");
    }
}

/// The result of a probe script in the page with this data.
fn seen(browser: &Path, name: &str, dark: bool, html: &str, told: &Value) -> Value {
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("live-page-{name}"));
    fs::create_dir_all(&directory).unwrap();
    let page = directory.join("page.html");
    let told = told.to_string().replace('<', "\\u003c");
    let head = format!(
        "<script>const told = {told}, errors = [];\
         addEventListener('error', event => errors.push(String(event.message)));\
         window.fetch = async path => new Response(JSON.stringify(told[path]));</script></head>"
    );
    let html = html.replace("</head>", &head).replace("</body>", &format!("{PROBE}</body>"));
    fs::write(&page, html).unwrap();
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--window-size=1400,1000", "--virtual-time-budget=3000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", directory.join("profile").display()));
    if dark {
        command.arg("--blink-settings=preferredColorScheme=0");
    }
    let output = command.arg(format!("file://{}", page.display())).output().unwrap();
    let dom = text(&output.stdout);
    let seen =
        dom.split_once("<pre id=\"seen\" hidden=\"\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (seen, _) = seen.unwrap_or_else(|| panic!("no probe in: {dom}{}", text(&output.stderr)));
    let seen = seen.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&seen).unwrap()
}

#[expect(clippy::print_stdout, reason = "a skipped test says why")]
fn browser() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).flat_map(|directory| names.map(|name| directory.join(name)));
    let found = found.into_iter().find(|file| file.is_file());
    if found.is_none() {
        println!("skipped: no Chromium or Chrome in PATH");
    }
    found
}

const PROBE: &str = r##"<pre id="seen" hidden></pre><script>
addEventListener("load", () => setTimeout(() => {
  const all = [...document.querySelectorAll("body *")];
  const wider = edge => all.filter(element => !element.closest(".scroll, svg, #seen"))
    .filter(element => element.getBoundingClientRect().right > edge).map(element => element.outerHTML.slice(0, 80));
  const texts = query => [...document.querySelectorAll(query)].map(element => element.textContent);
  const seen = {
    errors, dark: matchMedia("(prefers-color-scheme: dark)").matches,
    resources: performance.getEntriesByType("resource").map(entry => entry.name),
    volumes: texts("#volumes tbody th"), notes: texts("#volumes .notes > *"), sessions: texts("#sessions tbody th"),
    disks: texts("#disks tbody :is(th, td:not(.notes, .number), .notes > *)"),
    initiator: document.querySelector("#sessions td.long").textContent,
    drift: texts("#drift-section:not([hidden]) li"), config: document.getElementById("config").textContent,
    charts: document.querySelectorAll("figure svg").length,
    lines: [...document.querySelectorAll("figure svg")].every(chart => chart.querySelector("text")),
    wider_than_wide: wider(innerWidth + 0.5),
    exported: texts("#volumes tbody tr:first-child .exported > *"),
  };
  const names = () => texts("#volumes tbody th"), filter = document.getElementById("filter"), active = document.getElementById("active");
  const look = () => [...names(), document.getElementById("shown").textContent];
  const sort = heading => document.querySelectorAll("#volumes thead button")[heading].click();
  sort(0); const up = look(); sort(0); seen.sorted = [up, look()];
  filter.value = "iqn.2026-11.blockmux:B"; filter.dispatchEvent(new Event("input")); seen.filtered = look();
  filter.value = ""; active.click(); seen.active = look(); active.click(); seen.all = look();
  document.documentElement.style.width = "390px";
  seen.wider_than_narrow = wider(390.5);
  document.getElementById("seen").textContent = JSON.stringify(seen);
}, 500));
</script>"##;
