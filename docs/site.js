// The search of the site treats a leading dash as "without this word", and an underscore as a
// letter. People search for flags as they type them: --save-interval and save_interval are both
// the words "save interval".
const QUERY = 2; // the type of a message to the search worker that contains what was typed
const post = Worker.prototype.postMessage;

Worker.prototype.postMessage = function (message, ...rest) {
  if (message && message.type === QUERY && typeof message.data === "string") {
    const words = message.data.split(/\s+/).map((word) => word.replace(/^-+/, "").replace(/_/g, "-"));
    message = { ...message, data: words.join(" ") };
  }
  return post.call(this, message, ...rest);
};
