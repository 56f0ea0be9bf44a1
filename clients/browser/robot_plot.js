'use strict';
/** Small drawings of numbers as SVG: the actions of a chunk, and how long calls took. Nothing here knows the server. */

const NAMESPACE = 'http://www.w3.org/2000/svg';
const WIDTH = 480;
const HEIGHT = 128;
const TIMES_HEIGHT = 28;
const MARGIN = 6;
/** Hues far enough apart to tell lines from each other, on both grounds. */
const HUES = [38, 205, 150, 340, 265, 95, 15, 185];

/**
 * Draw the actions of a chunk: a line for each dimension over the control steps, all on one scale.
 * @param {number[][]} rows  One row for each control step.
 */
export function actionsPlot(rows) {
  const [from, to] = rangeOf(rows);
  const plot = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', class: 'plot', role: 'img' });
  const numDims = rows[0]?.length ?? 0;
  plot.setAttribute('aria-label', `The last ${rows.length} actions of ${numDims} dimensions`);
  if (from <= 0 && to >= 0) {
    const zero = heightOf(0, HEIGHT, from, to).toFixed(1);
    plot.append(svg('line', { class: 'axis', x1: 0, x2: WIDTH, y1: zero, y2: zero }));
  }
  for (let dim = 0; dim < numDims; dim += 1) {
    const points = linePoints(rows.map((row) => row[dim] ?? 0), WIDTH, HEIGHT, from, to);
    const hue = HUES[dim % HUES.length];
    plot.append(svg('polyline', { points, stroke: `hsl(${hue} 62% 58%)`, 'vector-effect': 'non-scaling-stroke' }));
  }
  return plot;
}

/**
 * Draw how long the latest calls took, from zero up.
 * @param {number[]} times
 */
export function timesPlot(times) {
  const plot = svg('svg', {
    viewBox: `0 0 ${WIDTH} ${TIMES_HEIGHT}`, preserveAspectRatio: 'none', class: 'times', 'aria-hidden': 'true',
  });
  const points = linePoints(times, WIDTH, TIMES_HEIGHT, 0, Math.max(...times));
  plot.append(svg('polyline', { points, stroke: 'currentColor', 'vector-effect': 'non-scaling-stroke' }));
  return plot;
}

/**
 * The smallest and the largest number of all rows.
 * @param {number[][]} rows
 */
export function rangeOf(rows) {
  const values = rows.flat();
  return [Math.min(...values), Math.max(...values)];
}

/**
 * Points of a polyline over the whole width.
 * @param {number[]} values
 * @param {number} width
 * @param {number} height
 * @param {number} from  What the lower edge stands for.
 * @param {number} to    What the upper edge stands for.
 */
function linePoints(values, width, height, from, to) {
  return values
    .map((value, index) => {
      const x = values.length > 1 ? (width * index) / (values.length - 1) : width / 2;
      return `${x.toFixed(1)},${heightOf(value, height, from, to).toFixed(1)}`;
    })
    .join(' ');
}

/**
 * Where a value stands, from the upper edge down; in the middle if there is no range.
 * @param {number} value
 * @param {number} height
 * @param {number} from
 * @param {number} to
 */
function heightOf(value, height, from, to) {
  return to > from ? MARGIN + ((height - 2 * MARGIN) * (to - value)) / (to - from) : height / 2;
}

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 */
function svg(tag, attributes) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}
