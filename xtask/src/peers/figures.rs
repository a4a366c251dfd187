//! Every run of every server with every client, with medians and extremes.

use super::matrix::Cell;
use serde_json::{Value, json};

/// One run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sample {
    pub(crate) iops: f64,
    /// Mean completion latency in microseconds.
    pub(crate) mean_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    /// CPU time of the server, user and system, for each I/O, in microseconds.
    pub(crate) server_us: Option<f64>,
    /// CPU use of other programs meanwhile, in CPUs.
    pub(crate) others: f64,
}

/// One server with one client in one cell.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) client: &'static str,
    pub(crate) server: &'static str,
    pub(crate) cell: Cell,
    /// The runs in chronological order.
    pub(crate) samples: Vec<Sample>,
}

/// Every row of a comparison, in display order.
#[derive(Debug, Default)]
pub(crate) struct Rows(pub(crate) Vec<Row>);

/// Median and extremes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// Median and extremes of values; `None` if there are no values.
    pub(crate) fn of(values: impl Iterator<Item = f64>) -> Option<Spread> {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let (&min, &max) = (values.first()?, values.last()?);
        let median = f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]);
        Some(Spread { median, min, max })
    }

    /// Half the range in per cent of the median.
    pub(crate) fn half_range_percent(&self) -> f64 {
        if self.median > 0.0 { (self.max - self.min) / 2.0 / self.median * 100.0 } else { 0.0 }
    }

    fn json(self) -> Value {
        json!({ "median": self.median, "min": self.min, "max": self.max })
    }
}

impl Row {
    pub(crate) fn iops(&self) -> Option<Spread> {
        Spread::of(self.samples.iter().map(|sample| sample.iops))
    }

    /// Median over the samples that have the figure.
    pub(crate) fn median(&self, figure: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        Spread::of(self.samples.iter().filter_map(figure)).map(|spread| spread.median)
    }

    /// Every run, with the summary.
    pub(crate) fn json(&self) -> Value {
        let Cell { rw, bs, iodepth, numjobs } = self.cell;
        let sample = |sample: &Sample| {
            let Sample { iops, mean_us, p99_us, server_us, others } = sample;
            json!({
                "iops": iops, "latency_mean_us": mean_us, "latency_p99_us": p99_us,
                "server_cpu_us_per_io": server_us, "others_processors": others,
            })
        };
        json!({
            "client": self.client,
            "server": self.server,
            "rw": rw.name(),
            "bs": bs,
            "iodepth": iodepth,
            "numjobs": numjobs,
            "iops": self.iops().map(Spread::json),
            "latency_mean_us": self.median(|sample| sample.mean_us),
            "latency_p99_us": self.median(|sample| sample.p99_us),
            "server_cpu_us_per_io": self.median(|sample| sample.server_us),
            "runs": self.samples.iter().map(sample).collect::<Vec<_>>(),
        })
    }
}

impl Rows {
    /// Adds a run to its row; a row is made by its first run.
    pub(crate) fn add(&mut self, client: &'static str, server: &'static str, cell: Cell, sample: Sample) {
        let same = |row: &&mut Row| row.client == client && row.server == server && row.cell == cell;
        match self.0.iter_mut().find(same) {
            Some(row) => row.samples.push(sample),
            None => self.0.push(Row { client, server, cell, samples: vec![sample] }),
        }
    }

    /// One row, if it was measured.
    pub(crate) fn get(&self, client: &str, server: &str, cell: Cell) -> Option<&Row> {
        self.0.iter().find(|row| row.client == client && row.server == server && row.cell == cell)
    }

    /// The rows of one client in one cell.
    pub(crate) fn of(&self, client: &str, cell: Cell) -> Vec<&Row> {
        self.0.iter().filter(|row| row.client == client && row.cell == cell).collect()
    }

    /// Median IOPS of a row.
    pub(crate) fn iops(&self, client: &str, server: &str, cell: Cell) -> Option<f64> {
        self.get(client, server, cell)?.iops().map(|iops| iops.median)
    }

    /// CPU use of other programs during the runs, in CPUs; `None` if there were no runs.
    pub(crate) fn others(&self) -> Option<Spread> {
        Spread::of(self.0.iter().flat_map(|row| &row.samples).map(|sample| sample.others))
    }

    /// The largest median of IOPS among `servers`.
    pub(crate) fn best(&self, client: &str, servers: &[&str], cell: Cell) -> Option<f64> {
        servers.iter().filter_map(|server| self.iops(client, server, cell)).max_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::matrix::Rw;

    const CELL: Cell = Cell::new(Rw::RandRead, 4096, 32, 1);

    fn sample(iops: f64) -> Sample {
        Sample { iops, ..Sample::default() }
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle_two() {
        let spread = Spread::of([40.0, 10.0, 20.0, 30.0].into_iter()).unwrap();
        assert_eq!(spread, Spread { median: 25.0, min: 10.0, max: 40.0 });
        assert!((spread.half_range_percent() - 60.0).abs() < 1e-9);
        assert_eq!(Spread::of([3.0, 1.0, 2.0].into_iter()).map(|spread| spread.median), Some(2.0));
        assert_eq!(Spread::of(std::iter::empty()), None);
    }

    #[test]
    fn runs_of_one_server_client_and_cell_form_one_row() {
        let mut rows = Rows::default();
        let other = Cell { iodepth: 1, ..CELL };
        for (server, cell, iops) in [("a", CELL, 1.0), ("b", CELL, 9.0), ("a", other, 5.0), ("a", CELL, 3.0)]
        {
            rows.add("fio", server, cell, sample(iops));
        }
        assert_eq!(rows.0.len(), 3);
        assert_eq!(rows.iops("fio", "a", CELL), Some(2.0));
        assert_eq!(rows.best("fio", &["a", "b", "c"], CELL), Some(9.0));
        assert_eq!(rows.best("fio", &["a", "b"], other), Some(5.0));
        assert_eq!(rows.iops("qemu-img", "a", CELL), None);
        assert_eq!(rows.of("fio", CELL).len(), 2);
    }

    #[test]
    fn a_figure_is_the_median_of_the_runs_that_have_it() {
        let with = |mean_us| Sample { mean_us, ..sample(1.0) };
        let row = Row {
            client: "fio",
            server: "a",
            cell: CELL,
            samples: vec![with(Some(4.0)), with(None), with(Some(2.0))],
        };
        assert_eq!(row.median(|sample| sample.mean_us), Some(3.0));
        assert_eq!(row.median(|sample| sample.p99_us), None);
        assert_eq!(row.json()["latency_mean_us"], 3.0);
        assert_eq!(row.json()["runs"].as_array().map(Vec::len), Some(3));
    }
}
