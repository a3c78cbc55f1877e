//! Results as a picture: time over the bytes that a call must move, both logarithmic, beside the floor and other libraries.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use plotters::prelude::*;

use crate::results::{Results, Row};

const SIZE: (u32, u32) = (880, 560);
const FONT: &str = "sans-serif";
/// The row counts that are drawn, with a colour each.
const ROWS: [(usize, RGBColor); 4] = [
    (1, RGBColor(0, 90, 181)),
    (7, RGBColor(30, 150, 90)),
    (8, RGBColor(220, 140, 0)),
    (16, RGBColor(200, 40, 40)),
];
/// Peers are drawn at one row, as crosses in these greys.
const GREYS: [RGBColor; 3] = [RGBColor(110, 110, 110), RGBColor(160, 160, 160), RGBColor(200, 200, 200)];

/// The picture of an implementation: `folder/<gpu>-<id>.svg`, with `/` in the id as `-`.
pub fn path(results: &Results, id: &str, folder: &Path) -> PathBuf {
    let path = results.path(folder);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{}.svg", id.replace('/', "-")))
}

/// Draws an implementation's rows, and those of peers with the same weights, to its [`path`].
///
/// # Errors
/// With the path, when the file cannot be written.
pub fn draw(results: &Results, id: &str, folder: &Path) -> Result<PathBuf> {
    let path = path(results, id, folder);
    let rows: Vec<&Row> =
        results.rows_of(id).filter(|row| ROWS.iter().any(|(m, _)| count(row) == Some(*m))).collect();
    chart(results, id, &rows, &path).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The rows of a call of either kind.
fn count(row: &Row) -> Option<usize> {
    row.m.or(row.rows)
}

/// Megabytes that a call must move: its floor at the measured bandwidth.
fn megabytes(row: &Row, read_gbs: f64) -> f64 {
    row.floor_us * read_gbs / 1e3
}

fn chart(results: &Results, id: &str, rows: &[&Row], path: &Path) -> Result<()> {
    if rows.is_empty() {
        bail!("{id} has no row at one of the row counts that are drawn");
    }
    let gbs = results.read_gbs;
    let peers = peers(results, rows);
    let sizes = rows.iter().chain(&peers).map(|row| megabytes(row, gbs));
    let (least, most) = sizes.fold((f64::INFINITY, 0f64), |(least, most), mb| (least.min(mb), most.max(mb)));
    let (left, right) = (least / 1.6, most * 2.6);
    let floor = |mb: f64| mb * 1e3 / gbs;
    let slowest = rows.iter().chain(&peers).map(|row| row.us).fold(floor(right), f64::max);

    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let caption = format!("{id} on {}: one call, cold weights", results.gpu);
    let mut chart = ChartBuilder::on(&area)
        .caption(caption, (FONT, 20))
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d((left..right).log_scale(), (floor(left)..slowest * 1.6).log_scale())?;
    chart
        .configure_mesh()
        .x_desc("megabytes that the call must move")
        .y_desc("microseconds")
        .x_label_formatter(&tick)
        .y_label_formatter(&tick)
        .label_style((FONT, 14))
        .axis_desc_style((FONT, 15))
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    chart
        .draw_series(LineSeries::new([(left, floor(left)), (right, floor(right))], BLACK.stroke_width(1)))?
        .label(format!("floor at {gbs:.0} GB/s"))
        .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLACK));
    for (m, colour) in ROWS {
        let points = rows.iter().filter(|row| count(row) == Some(m)).map(|row| (megabytes(row, gbs), row.us));
        let points: Vec<(f64, f64)> = points.collect();
        if points.is_empty() {
            continue;
        }
        let name = if rows.iter().any(|row| row.is_of_loop()) { "rows" } else { "M" };
        chart
            .draw_series(points.into_iter().map(|point| Circle::new(point, 5, colour.filled())))?
            .label(format!("{name} = {m}"))
            .legend(move |(x, y)| Circle::new((x + 9, y), 5, colour.filled()));
    }
    let mut names: Vec<&str> = peers.iter().filter_map(|row| row.peer()).collect();
    names.sort_unstable();
    names.dedup();
    for (name, grey) in names.into_iter().zip(GREYS.into_iter().cycle()) {
        let grey = grey.stroke_width(2);
        let points =
            peers.iter().filter(|row| row.peer() == Some(name)).map(|row| (megabytes(row, gbs), row.us));
        chart
            .draw_series(points.map(|point| Cross::new(point, 4, grey)))?
            .label(format!("{name}, one row"))
            .legend(move |(x, y)| Cross::new((x + 9, y), 4, grey));
    }
    chart.draw_series(labels(rows, &peers, gbs))?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(BLACK.mix(0.3))
        .background_style(WHITE)
        .label_font((FONT, 14))
        .draw()?;
    area.present()?;
    Ok(())
}

/// The peers' calls of one row with the same weights, or of the same part of a loop.
fn peers<'a>(results: &'a Results, rows: &[&Row]) -> Vec<&'a Row> {
    let first = rows.first();
    let (weights, what) = (first.and_then(|row| row.weights()), first.map(|row| row.what.as_str()));
    let is_of_loop = first.is_some_and(|row| row.is_of_loop());
    let is_same = |row: &Row| match is_of_loop {
        true => row.is_of_loop() && what == Some(row.what.as_str()),
        false => row.weights() == weights,
    };
    let is_peer = |row: &&Row| row.peer().is_some() && count(row) == Some(1) && is_same(row);
    results.rows.iter().filter(is_peer).collect()
}

/// What a point is of.
fn subject(row: &Row) -> String {
    match (row.n, row.k, row.ctx, &row.binding) {
        (Some(n), Some(k), ..) => format!("{n} x {k}"),
        (.., Some(binding)) => format!("{}, {binding}", row.shape.as_deref().unwrap_or_default()),
        (_, _, Some(ctx), None) => format!("{ctx} positions"),
        _ => row.shape.clone().unwrap_or_default(),
    }
}

/// The name of a tick of a logarithmic axis: 1, 2 and 5 times a power of ten have one, as there is no room for more.
fn tick(value: &f64) -> String {
    let leading = value / 10f64.powf(value.log10().floor());
    let named = [1.0, 2.0, 5.0].iter().any(|digit| (leading - digit).abs() < 1e-6);
    if named { value.to_string() } else { String::new() }
}

/// The shape of each point of M = 1 and its share of the floor, to the lower right of the point. Where a second shape moves the
/// same bytes, its label goes above their points.
fn labels(rows: &[&Row], peers: &[&Row], gbs: f64) -> Vec<Text<'static, (f64, f64), String>> {
    let mut points: Vec<(f64, &Row)> =
        rows.iter().filter(|row| count(row) == Some(1)).map(|row| (megabytes(row, gbs), *row)).collect();
    points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut labels = Vec::with_capacity(points.len());
    let mut last = 0f64;
    for (mb, row) in points {
        let there = rows.iter().chain(peers).filter(|other| subject(other) == subject(row));
        let slowest = there.map(|other| other.us);
        let at = match mb < last * 1.05 {
            true => (mb / 1.6, slowest.fold(row.us, f64::max) * 1.35),
            false => (mb * 1.03, row.us / 1.22),
        };
        last = mb;
        let label = format!("{}: {:.0} %", subject(row), row.ratio * 100.0);
        labels.push(Text::new(label, at, (FONT, 12).into_font()));
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::samples;

    fn drawn(id: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = draw(&samples::results(), id, folder.path()).unwrap();
        assert_eq!(
            path.file_name().unwrap().to_str(),
            Some(format!("test-{}.svg", id.replace('/', "-")).as_str())
        );
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn peers_of_the_same_weights_are_in_the_legend() {
        let picture = drawn("linear_proj/w8a16_static");
        for text in ["floor at 1000 GB/s", "M = 16", "gemlite 0.6, one row", "humming 0.1.20, one row"] {
            assert!(picture.contains(text), "{text}");
        }
        assert!(!picture.contains("cublas"), "its weights are BF16");
        assert!(picture.contains("6250 x 2000: 62 %"), "with overlap, 12.5 of 20 us");
        assert!(!drawn("linear_proj/nvfp4_dynamic").contains("humming"), "measured at 2048 rows alone");
    }
}
