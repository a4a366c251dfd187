# `make bench` needs a Rust toolchain and a C compiler. `make test` installs the programs that it tests against if it runs as
# root on Debian; otherwise it skips the tests of missing programs and says so.

.DEFAULT_GOAL := help
.PHONY: help bench bench-full test test-vm fmt clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

bench: ## Build, measure every protocol on loopback in a minute, print the table and write the report (ARGS="--runs 5")
	cargo build --release --package blockmux
	"$${CARGO_TARGET_DIR:-target}/release/blockmux" bench $(ARGS)

bench-full: ## The same with eight jobs, both ceilings and longer runs: twelve minutes
	$(MAKE) bench ARGS="--full $(ARGS)"

test: ## Everything that must hold before a change goes in
	cargo xtask install-peers
	cargo xtask ci

test-vm: ## Tests with the Linux kernel as the peer, emulated (ARGS="iscsi" for one script of tests/vm)
	cargo xtask install-peers
	cargo xtask vm $(ARGS)

fmt: ## Format all sources
	cargo fmt --all
	cargo fmt --manifest-path fuzz/Cargo.toml

clean: ## Remove what was built
	cargo clean
	cargo clean --manifest-path fuzz/Cargo.toml
