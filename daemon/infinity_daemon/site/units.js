// Number formatters. A value that is not a number (for example the loss "nan") is returned as it is.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Format a number with three significant digits, or with all digits of its integer part if there are more. */
function digits(value) {
  return Math.abs(value) >= 100 ? grouped.format(value) : String(Number(value.toPrecision(3)).toPrecision(3));
}

function scaled(value, base, units) {
  if (typeof value !== "number") return String(value);
  let at = 0;
  // A value of 999.5 or more would be rounded to four digits.
  while (Math.abs(value) >= Math.min(base, 999.5) && at < units.length - 1) {
    value /= base;
    at += 1;
  }
  return `${at ? digits(value) : grouped.format(value)} ${units[at]}`;
}

/** Format a size in binary units, as in the settings. */
export const bytes = (value) => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);

/** Format a data rate in decimal units, as is usual for drives. */
export const rate = (value) => scaled(value, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);

/** Format an endurance in decimal units, as in data sheets. */
export const endurance = (value) => scaled(value, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);

export function count(value) {
  if (typeof value !== "number") return String(value);
  return Math.abs(value) < 1e12 ? grouped.format(value) : value.toExponential(3);
}

/** Format a number of items per second, with decimals for small values. */
export function perSecond(value) {
  return typeof value === "number" && Math.abs(value) < 100 ? digits(value) : count(value);
}

export function share(value) {
  if (typeof value !== "number") return String(value);
  const percent = 100 * value;
  return `${percent > 0 && percent < 0.1 ? "< 0.1" : percent.toFixed(Math.abs(percent) >= 99.95 ? 0 : 1)} %`;
}

/** Format a number with `precision` digits, and with an exponent if it is tiny or huge. */
export function plain(value, precision = 4) {
  if (typeof value !== "number") return String(value);
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(precision - 1);
  return value.toPrecision(precision);
}

/** Format a duration, with milliseconds or decimals if it is short. */
export function duration(seconds) {
  if (typeof seconds !== "number") return String(seconds);
  if (seconds < 0) seconds = 0;
  if (seconds < 0.9995) return `${digits(1000 * seconds)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(seconds < 9.995 ? 2 : 1)} s`;
  return whole(seconds);
}

/** Format a duration in its two largest units, rounded to seconds. */
export function whole(seconds) {
  if (typeof seconds !== "number") return String(seconds);
  const all = Math.max(0, Math.round(seconds));
  const parts = [[Math.floor(all / 86400), "d"], [Math.floor(all / 3600) % 24, "h"], [Math.floor(all / 60) % 60, "min"],
    [all % 60, "s"]];
  const first = parts.findIndex(([number]) => number > 0);
  if (first < 0) return "0 s";
  return parts.slice(first, first + 2).filter(([number]) => number > 0).map(([number, unit]) => `${number} ${unit}`)
    .join(" ");
}
