//! The README's tables of results, between two comments: `cargo run -p benches --bin draw` writes them, and a test holds them to
//! the JSON.

use anyhow::{Context, Result};

use crate::plot;
use crate::results::{Results, Row, Weights};
use crate::table::filled;

const BEGIN: &str = "<!-- `cargo run -p benches --bin draw` writes what follows from results/*.json -->\n";
const END: &str = "<!-- to here -->\n";

const DECODE: [&str; 10] = [
    "N x K",
    "M = 1",
    "floor / time",
    "no overlap",
    "best peer",
    "M = 8",
    "M = 16",
    "floor / time",
    "no overlap",
    "best peer",
];
const LOOP: [&str; 10] = [
    "what",
    "shape",
    "context",
    "binding",
    "rows",
    "time",
    "floor / time",
    "tokens/s",
    "launches",
    "best peer",
];
const PROMPT: [&str; 5] = ["N x K", "M = 2048", "TFLOP/s", "best BF16 peer", "best peer of these weights"];

/// The README with its tables written anew. `pending` is `results/PENDING.md`, or empty.
///
/// # Errors
/// When one of the two comments is missing.
pub fn rewrite(readme: &str, all: &[Results], pending: &str) -> Result<String> {
    let (before, rest) = readme.split_once(BEGIN).with_context(|| format!("no line {BEGIN:?}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("no line {END:?} after it"))?;
    let sections: String = all.iter().map(|results| section(results, pending)).collect();
    Ok(format!("{before}{BEGIN}\n{sections}{END}{after}"))
}

/// One GPU: what was measured there, then a picture and tables for each implementation.
fn section(results: &Results, pending: &str) -> String {
    let mut text = heading(results) + "\n\n";
    for id in results.ids() {
        let picture = plot::path(results, id, "results".as_ref());
        text += &format!("`{id}`");
        if pending.contains(id) {
            text += ", whose kernels have changed since ([pending](results/PENDING.md))";
        }
        text += "\n\n";
        text += &format!(
            "![Time of a call over the bytes it must move, beside the floor]({})\n\n",
            picture.display()
        );
        let shapes = shapes(results, id);
        text += &table(&DECODE, shapes.iter().map(|&shape| decode(results, id, shape)).collect());
        text += &table(&PROMPT, shapes.iter().filter_map(|&shape| prompt(results, id, shape)).collect());
        let loops = results.rows_of(id).filter(|row| row.is_of_loop());
        text += &table(&LOOP, loops.map(|row| loop_cells(results, row)).collect());
    }
    text
}

/// What was measured, and what its columns mean.
fn heading(results: &Results) -> String {
    let Results { gpu, date, read_gbs, rows, .. } = results;
    let file = results.path("results".as_ref());
    let mut text = format!(
        "**{gpu}**, {date}: the streaming read reached {read_gbs:.0} GB/s in the same run ([all rows]({})).",
        file.display()
    );
    if rows.iter().any(|row| !row.overlap) {
        text += " *No overlap* is without programmatic dependent launch.";
    }
    let mut peers: Vec<&str> = rows.iter().filter_map(Row::peer).collect();
    peers.sort_unstable();
    peers.dedup();
    if !peers.is_empty() {
        text +=
            &format!(" Peers: {}; those of projections multiply BF16 rows as they are.", peers.join(", "));
    }
    text
}

/// N and K that an implementation was measured with, in the order in which it was.
fn shapes(results: &Results, id: &str) -> Vec<(usize, usize)> {
    let mut shapes = Vec::new();
    for shape in results.rows_of(id).filter_map(|row| row.n.zip(row.k)) {
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// The columns that hold anything, as a table in Markdown.
fn table(headings: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let (headings, rows) = filled(headings, &rows);
    let line = |cells: &[&str]| format!("| {} |\n", cells.join(" | "));
    let rule = format!("|{}\n", "---|".repeat(headings.len()));
    line(&headings) + &rule + &rows.iter().map(|row| line(row)).collect::<String>() + "\n"
}

fn decode(results: &Results, id: &str, (n, k): (usize, usize)) -> Vec<String> {
    let call = |m| find(results, id, n, k, m);
    let beside_peers = |m| {
        let row: Option<&Row> = call(m);
        let peer = row.and_then(|row| results.best_peer(row, row.weights()?));
        [
            row.map(us).unwrap_or_default(),
            row.map(|row| format!("{:.2}", row.ratio)).unwrap_or_default(),
            row.and_then(|row| results.without_overlap(row)).map(us).unwrap_or_default(),
            peer.map(|peer| format!("{} ({})", us(peer), name(peer))).unwrap_or_default(),
        ]
    };
    let mut cells = vec![format!("{n} x {k}")];
    cells.extend(beside_peers(1));
    cells.push(call(8).map(us).unwrap_or_default());
    cells.extend(beside_peers(16));
    cells
}

fn loop_cells(results: &Results, row: &Row) -> Vec<String> {
    let dim = |dim: Option<usize>| dim.map(|dim| dim.to_string()).unwrap_or_default();
    let time = if row.us < 1e3 { us(row) } else { format!("{:.2} ms", row.us / 1e3) };
    let peer = results.best_peer_of_any(row);
    vec![
        row.what.replace('_', " "),
        row.shape.clone().unwrap_or_default(),
        dim(row.ctx),
        row.binding.clone().unwrap_or_default(),
        dim(row.rows),
        time,
        format!("{:.2}", row.ratio),
        row.tok_s.map(|tok_s| format!("{tok_s:.0}")).unwrap_or_default(),
        dim(row.launches),
        peer.map(|peer| {
            format!("{} ({} {})", us(peer), name(peer), peer.format.as_deref().unwrap_or_default())
        })
        .unwrap_or_default(),
    ]
}

fn prompt(results: &Results, id: &str, (n, k): (usize, usize)) -> Option<Vec<String>> {
    let row = find(results, id, n, k, 2048)?;
    let tflops = |row: &Row| row.tflops().map(|tflops| format!("{tflops:.0}")).unwrap_or_default();
    let beside = |peer: Option<&Row>| peer.map(|peer| format!("{} ({})", tflops(peer), name(peer)));
    Some(vec![
        format!("{n} x {k}"),
        us(row),
        tflops(row),
        beside(results.best_peer(row, Weights::Bf16)).unwrap_or_default(),
        beside(row.weights().and_then(|weights| results.best_peer(row, weights))).unwrap_or_default(),
    ])
}

fn find<'a>(results: &'a Results, id: &'a str, n: usize, k: usize, m: usize) -> Option<&'a Row> {
    results.rows_of(id).find(|row| (row.n, row.k, row.m) == (Some(n), Some(k), Some(m)))
}

fn us(row: &Row) -> String {
    format!("{:.1} us", row.us)
}

/// A peer without its version, which stands above.
fn name(peer: &Row) -> &str {
    peer.peer().and_then(|peer| peer.split(' ').next()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::results::samples;

    #[test]
    fn the_readme_is_of_these_results() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let readme = fs::read_to_string(root.join("README.md")).unwrap();
        let results = Results::read_all(&root.join("results")).unwrap();
        let pending = fs::read_to_string(root.join("results/PENDING.md")).unwrap_or_default();
        assert!(
            rewrite(&readme, &results, &pending).unwrap() == readme,
            "README.md is not written from results/: `cargo run -p benches --bin draw`"
        );
    }

    #[test]
    fn what_is_between_the_comments_is_replaced() {
        let readme = format!("# before\n{BEGIN}old{END}after\n");
        let pending = "linear_proj/nvfp4_dynamic: no GPU";
        let written = rewrite(&readme, &[samples::results()], pending).unwrap();
        let expected = "\
**NVIDIA Test**, 2026-12-01: the streaming read reached 1000 GB/s in the same run ([all rows](results/test.json)). \
*No overlap* is without programmatic dependent launch. \
Peers: cublas 13.1, gemlite 0.6, humming 0.1.20; those of projections multiply BF16 rows as they are.

`linear_proj/nvfp4_dynamic`, whose kernels have changed since ([pending](results/PENDING.md))

![Time of a call over the bytes it must move, beside the floor](results/test-linear_proj-nvfp4_dynamic.svg)

| N x K | M = 1 | floor / time |
|---|---|---|
| 6250 x 2000 | 50.0 us | 0.25 |

| N x K | M = 2048 | TFLOP/s | best BF16 peer | best peer of these weights |
|---|---|---|---|---|
| 6250 x 2000 | 64.0 us | 800 | 640 (cublas) | 400 (humming) |

`linear_proj/w8a16_static`

![Time of a call over the bytes it must move, beside the floor](results/test-linear_proj-w8a16_static.svg)

| N x K | M = 1 | floor / time | no overlap | best peer | M = 16 | floor / time |
|---|---|---|---|---|---|---|
| 6250 x 2000 | 20.0 us | 0.62 | 25.0 us | 30.0 us (humming) | 31.2 us | 0.40 |

";
        assert_eq!(written, format!("# before\n{BEGIN}\n{expected}{END}after\n"));
        assert_eq!(rewrite(&written, &[samples::results()], pending).unwrap(), written);
        assert!(rewrite("# no comments", &[], "").is_err());
    }
}
