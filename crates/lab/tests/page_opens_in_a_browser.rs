//! The page in a real browser: it renders in light and dark, fits a telephone, and requests
//! nothing.
//!
//! A probe is inserted into a copy of the page; the page itself has no script.

#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;

use blockmux_lab::page::render;
use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn it_renders_in_light() {
    let Some(seen) = opened("light", &[]) else { return };
    assert_eq!(seen["dark"], false);
    assert_eq!(seen["paper"], "rgb(251, 251, 249)");
    sound(&seen);
}

#[test]
fn it_renders_in_dark() {
    let Some(seen) = opened("dark", &["--blink-settings=preferredColorScheme=0"]) else { return };
    assert_eq!(seen["dark"], true);
    assert_eq!(seen["paper"], "rgb(20, 24, 27)");
    sound(&seen);
}

fn sound(seen: &Value) {
    assert_eq!(seen["errors"], Value::Array(Vec::new()), "script errors");
    assert_eq!(seen["resources"], Value::Array(Vec::new()), "requests beside the page itself");
    assert!(seen["charts"].as_u64().unwrap() > 20);
    assert_eq!(seen["flat_charts"], 0, "charts without a height");
    assert_eq!(seen["clipped"], Value::Array(Vec::new()), "drawn outside of its chart");
    assert_eq!(seen["wider_than_wide"], Value::Array(Vec::new()), "elements wider than a wide window");
    assert_eq!(seen["wider_than_narrow"], Value::Array(Vec::new()), "elements wider than 360 pixels");
}

/// The probe's result; `None`, with the reason printed, if there is no browser.
#[allow(clippy::print_stderr, reason = "a skipped test says why")]
fn opened(name: &str, options: &[&str]) -> Option<Value> {
    let Some(browser) = browser() else {
        eprintln!("skipped: no Chromium or Chrome in PATH");
        return None;
    };
    let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("page-{name}"));
    std::fs::create_dir_all(&directory).unwrap();
    let page = directory.join("page.html");
    let html = render(&fixture::comparison(), Some(&fixture::study())).unwrap();
    std::fs::write(&page, html.replace("</body>", &format!("{PROBE}</body>"))).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--window-size=1600,1200", "--dump-dom"])
        .arg(format!("--user-data-dir={}", directory.join("profile").display()))
        .args(options)
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    let seen = dom.split_once("<pre id=\"seen\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (seen, _) =
        seen.unwrap_or_else(|| panic!("no probe in: {}", String::from_utf8_lossy(&output.stderr)));
    let seen = seen.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    Some(serde_json::from_str(&seen).unwrap())
}

fn browser() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).flat_map(|directory| names.map(|name| directory.join(name)));
    found.into_iter().find(|file| file.is_file())
}

const PROBE: &str = r#"<pre id="seen"></pre><script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message)));
addEventListener("load", () => {
  const all = [...document.querySelectorAll("body *")];
  const charts = [...document.querySelectorAll("svg")];
  const scrolled = element => element.closest(".scroll, .command, .skip, svg, #seen");
  const wider = edge => all.filter(element => !scrolled(element) && element.getBoundingClientRect().right > edge)
    .map(element => element.outerHTML.slice(0, 80));
  const clipped = charts.flatMap(chart => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll("text, line, rect, circle, polyline")].filter(drawn => {
      const box = drawn.getBoundingClientRect();
      return box.left < frame.left - 2 || box.right > frame.right + 12 || box.bottom > frame.bottom + 2;
    }).map(drawn => drawn.textContent || drawn.outerHTML);
  });
  const seen = {
    errors, clipped, charts: charts.length,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    paper: getComputedStyle(document.body).backgroundColor,
    resources: performance.getEntriesByType("resource").map(entry => entry.name),
    flat_charts: charts.filter(chart => chart.getBoundingClientRect().height < 40).length,
    wider_than_wide: wider(innerWidth),
  };
  document.documentElement.style.width = "360px";
  seen.wider_than_narrow = wider(360.5);
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>"#;
