"""Addresses that lead to no prose: hosts of pictures, videos, code, shops and social networks, and
files of other types. The choice is this project's; --domains and --extensions add to it."""

DOMAINS = frozenset(
    # pictures
    "500px artstation deviantart flickr gfycat giphy gyazo imagebam imageshack imgbb imgflip imgur "
    "instagram photobucket pinimg pinterest pixiv postimg shutterstock tinypic tumblr unsplash "
    # videos and sound
    "bandcamp dailymotion liveleak mixcloud netflix soundcloud spotify streamable tiktok twitch "
    "vevo vimeo vine vocaroo youtu youtube ytimg "
    # social networks and chats
    "discord discordapp facebook fbcdn linkedin mastodon redd reddit redditmedia snapchat t "
    "telegram twimg twitter vk weibo whatsapp x "
    # shops and their links
    "aliexpress amazon amzn apple bestbuy ebay etsy ikea newegg pcpartpicker steampowered walmart "
    # files, code and services that need more than a page
    "akamaihd archive bitbucket cloudfront dropbox github gitlab google goo googleusercontent "
    "icloud mediafire mega onedrive pastebin rapidshare scribd sourceforge zippyshare "
    # polls, memes, shorteners
    "bit imgfave knowyourmeme lmgtfy memegenerator quickmeme strawpoll tinyurl 9gag "
    # a corpus of its own
    "wikimedia wikipedia "
    # pornography
    "e621 erome pornhub redtube spankbang xhamster xnxx xvideos".split()
)
"""Names without the public suffix: `youtube` stands for youtube.com and youtube.co.uk."""

EXTENSIONS = frozenset(
    # archives and programs
    "7z apk app bin bz2 deb dmg exe gz iso jar msi pkg rar rpm tar tgz xz zip zst "
    # pictures
    "ai bmp eps gif gifv ico jpeg jpg png psd svg tif tiff webp "
    # sound and videos
    "3gp aac aif avi flac flv m4a m4v mid midi mkv mov mp3 mp4 mpeg mpg ogg ogv opus qt ram swf "
    "wav webm wma wmv "
    # documents and data that are no web page
    "csv dat doc docx epub json log mobi odt pdf pps ppt pptx sql txt xls xlsx xml "
    # source and fonts
    "c cpp css h js otf py ttf woff woff2".split()
)
"""Endings of the path, in small letters."""
