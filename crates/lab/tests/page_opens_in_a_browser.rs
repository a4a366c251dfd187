//! x
#[allow(dead_code, reason = "each test file uses its own part of the fixture")]
mod fixture;
#[test]
fn t() {
    let html = blockmux_lab::page::render(&fixture::comparison(), &fixture::published()).unwrap();
    std::fs::write("/tmp/rep/full.html", html).unwrap();
    let html = blockmux_lab::page::render(&fixture::plain_comparison(), &[]).unwrap();
    std::fs::write("/tmp/rep/plain.html", html).unwrap();
}
